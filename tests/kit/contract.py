"""The behavior that uniclip guarantees, listed once: the tests run each program and each check,
and the docs print the table.
"""

from __future__ import annotations

from kit import contract_checks as checks
from kit import contract_programs as programs
from kit.frameworks import ALL_DTYPES, COMPILED, EAGER, Framework
from kit.promise import Program, Promise

__all__ = ["PROMISES", "Program", "Promise", "dtypes", "table"]

STANDARD = ["array-api-strict", "CuPy's stand-in"]
"""Libraries that implement the array API standard and nothing else."""
SPARSE = dict.fromkeys(["NumPy", *STANDARD, "MLX"], "the framework has no sparse arrays")
SPARSE["torch.compile"] = "`torch.compile` doesn't support sparse tensors"
NOT_NUMPY = [*STANDARD, "MLX", "PyTorch", "TensorFlow", "JAX"]
NOT_TORCH = dict.fromkeys(
    ["NumPy", *STANDARD, "MLX", "TensorFlow", "JAX"], "it has no such tensors"
)
ONE_LAYOUT = dict.fromkeys(
    [*STANDARD, "MLX", "TensorFlow", "JAX"], "its arrays have no such layouts"
)

PROMISES = [
    Promise(
        "norm ≤ limit",
        "the gradients come back bit for bit; eager NumPy, PyTorch, TensorFlow, and JAX on the "
        "CPU return the same arrays",
        (programs.Below(),),
    ),
    Promise(
        "norm > limit",
        "the direction stays, and the norm becomes the limit to a few units in the last place",
        (programs.Above(), programs.ToTheLimit()),
    ),
    Promise(
        "dtype, shape, tree",
        "each leaf keeps its dtype and shape; the norm is float32 or wider, never half precision",
        (programs.Keeps(), programs.Shapes()),
    ),
    Promise(
        "the report",
        "has the norms before clipping, the limits, the factors, and the fraction that was clipped",
        (programs.Reported(),),
    ),
    Promise(
        "an adaptive limit",
        "follows its formula, on norms before or after clipping, as documented; spikes of the loss "
        "count, too",
        (programs.Learns(),),
    ),
    Promise(
        "accuracy",
        "relative error of the norm ≤ 5·10⁻⁷ for 25 million float32 elements, 3 million equal "
        "ones, whose rounding errors all have one sign (≤ 1.5·10⁻⁶ in TensorFlow graphs without "
        "XLA), and rows and columns of 2 million; ≤ 2·10⁻⁶ for half precision",
        (programs.Accurate(), programs.EqualEntries(), programs.AlongAxes()),
    ),
    Promise(
        "accuracy on other processors",
        "the same with the BLAS kernels for Haswell (and Zen), and Nehalem",
        check=checks.accurate_on_other_processors,
        exceptions=dict.fromkeys(NOT_NUMPY, "it adds with its own kernels"),
    ),
    Promise(
        "any split into leaves, in any order",
        "the same norm, up to rounding; the same input gives the same bits again",
        (programs.Split(),),
    ),
    Promise(
        "finite gradients whose squares overflow or underflow",
        "norm and result are right: 1e30 and 1e-30 in float32, 300 in float16",
        (programs.InRange(),),
    ),
    Promise(
        "a factor beyond its dtype",
        "becomes the largest number of the dtype, or 0, in all frameworks; elements of 0 stay 0",
        (programs.FactorsOutOfRange(),),
    ),
    Promise(
        "finite gradients under a debugger",
        "no step creates NaN or infinity, also in reports and states, so "
        "`tf.debugging.enable_check_numerics`, `jax_debug_nans`, `jax_debug_infs`, and "
        "`detect_anomaly` don't stop; an unlimited norm has the largest number of its dtype as "
        "the limit",
        check=checks.under_a_debugger,
    ),
    Promise(
        "limit = ∞",
        "the norm is measured, and the gradients come back bit for bit",
        (programs.OnlyMeasures(),),
    ),
    Promise(
        "limit = 0",
        "all gradients become 0, never NaN, even if they were 0",
        (programs.ZeroLimit(),),
    ),
    Promise(
        "limit < 0 or NaN",
        (
            "`ValueError` with the argument and the value; NaN gradients if the limit is an "
            "array that can't be read"
        ),
        (programs.BadLimit(),),
        checks.bad_limits,
    ),
    Promise(
        "limits and bounds as any kind of number",
        "work the same: Python numbers, fractions, decimals, NumPy numbers, 0-d arrays",
        check=checks.takes_any_number,
    ),
    Promise(
        "NaN or ∞ in a gradient",
        "all elements that share its norm become NaN; the others are clipped as usual",
        (programs.Propagates(),),
    ),
    Promise(
        '… and `nonfinite="skip"`',
        "all gradients become 0, and `report.finite` is false",
        (programs.Skips(),),
    ),
    Promise(
        '… and `nonfinite="zero"`',
        "the non-finite elements become 0, and the rest is clipped",
        (programs.Zeroes(), programs.ZeroesComplex()),
    ),
    Promise(
        '… and `nonfinite="raise"`',
        (
            "`FloatingPointError` that names the leaves; in traced code, `TypeError` that names "
            "the other policies"
        ),
        check=checks.raises,
    ),
    Promise(
        "… and a stateful rule",
        "its state doesn't change, so later steps aren't affected",
        (programs.RemembersNoNaN(),),
    ),
    Promise(
        "saved and loaded state",
        "later steps are bitwise identical; if it belongs to other leaves or to another rule, "
        "a `ValueError` names them, before anything changes",
        check=checks.saved_states,
    ),
    Promise(
        "shards of one tree in several processes, `all_reduce=`",
        "their norms are combined, and all processes make the same decisions",
        (programs.Parts(),),
    ),
    Promise(
        "sparse gradients",
        (
            "stay sparse, also next to dense ones; repeated rows are summed first, and come back "
            "summed if clipped"
        ),
        (programs.Sparse(),),
        exceptions=SPARSE,
    ),
    Promise(
        "integers",
        "`clip_by_value` keeps them; norm rules return the framework's default float",
        (programs.Integers(),),
    ),
    Promise(
        "complex numbers",
        "the norm uses the modulus; `clip_by_value` raises `TypeError`",
        (programs.Complex(),),
        checks.complex_by_value,
    ),
    Promise(
        "8-bit floats",
        "are clipped as float32, and rounded once",
        check=checks.eight_bits,
        exceptions=dict.fromkeys(NOT_NUMPY, "separate tests cover them, or it has none"),
    ),
    Promise(
        "the same array in two places",
        "each place counts, like two equal gradients; `uc.clip_` writes the memory once",
        (programs.Twice(),),
    ),
    Promise(
        "empty and 0-d leaves, None, an empty tree",
        "add 0 to the norm and keep their places; the norm of an empty tree is 0",
        (programs.Empty(),),
        checks.empty_trees,
    ),
    Promise(
        "any error",
        "is raised before any array changes, tells you what to write instead, and prints no array",
        check=checks.nothing_changes_before_an_error,
    ),
    Promise(
        "leaves of two frameworks, or no array",
        "`TypeError` with the leaf's path and what to pass",
        check=checks.wrong_leaves,
    ),
    Promise(
        "in place, `uc.clip_`",
        (
            "writes the values that `uc.clip` returns into the arrays; `TypeError` if arrays are "
            "immutable: JAX, TensorFlow"
        ),
        (programs.InPlace(),),
        checks.in_place,
    ),
    Promise(
        "… and PyTorch's kinds of tensors",
        (
            "are written: sparse tensors, tensors with a graph, and inference tensors (only in "
            "inference mode; elsewhere an error)"
        ),
        check=checks.tensors_in_place,
        exceptions=NOT_TORCH,
    ),
    Promise(
        "… and views of one array",
        (
            "are written if each covers a separate stretch of memory; otherwise `ValueError` that "
            "names both"
        ),
        check=checks.overlaps,
        exceptions=ONE_LAYOUT,
    ),
    Promise(
        "read-only, strided, Fortran-order, broadcast arrays",
        "give right results, and keep their layout; in place, unwritable arrays raise `TypeError`",
        check=checks.memory,
        exceptions=ONE_LAYOUT,
    ),
    Promise(
        "derivative through the clip",
        "exact if the square of the norm is in range, and finite at zero",
        check=checks.slopes,
        exceptions=dict.fromkeys(["NumPy", *STANDARD], "it takes no derivatives of array API code"),
    ),
]

HEADINGS = {
    "norm ≤ limit": "Results",
    "accuracy": "Accuracy and range",
    "limit = ∞": "Unusual limits",
    "NaN or ∞ in a gradient": "NaN and infinity",
    "shards of one tree in several processes, `all_reduce=`": "Distributed training",
    "sparse gradients": "Kinds of arrays",
    "any error": "Errors",
    "in place, `uc.clip_`": "In place, and derivatives",
}
"""The headings of the page, by the case that each one precedes."""
WAYS = {
    "jax.jit-x64": "`jax.jit` in 64 bits",
    "jax.jit": "`jax.jit`",
    "tf.function": "`tf.function`",
    "tf.function-xla": "`tf.function` with XLA",
    "tensorflow-graph": "graphs of TensorFlow 1",
    "torch.compile": "`torch.compile`",
}
"""The names of the ways of running, as the page prints them."""


def table() -> str:
    """Return the guarantees as Markdown tables, with a reason for each exempt framework."""
    lines = []
    for promise in PROMISES:
        if promise.case in HEADINGS:
            lines += [
                "",
                f"### {HEADINGS[promise.case]}",
                "",
                "| case | what happens |",
                "| :-- | :-- |",
            ]
        said = [_capital(promise.what) + ".", *_except(promise)]
        lines.append(f"| {_capital(promise.case)} | {' '.join(said)} |")
    return "\n".join(lines).lstrip() + "\n"


def dtypes() -> str:
    """Return the dtypes that each framework is tested with, and a reason for each missing one."""
    lines = ["| framework | tested with |", "| :-- | :-- |"]
    for family, classes in _families().items():
        missing = [cls.missing for cls in classes]
        nowhere = {
            dtype: missing[0][dtype]
            for dtype in ALL_DTYPES
            if all(dtype in names for names in missing)
        }
        partly = {
            dtype: why for names in missing for dtype, why in names.items() if dtype not in nowhere
        }
        said = [f"all except {_listed(nowhere)}" if nowhere else "all"]
        said += [_listed(partly, "{} {}")] if partly else []
        lines.append(f"| {family} | {'; '.join(said)} |")
    return "\n".join(lines) + "\n"


def _families() -> dict[str, list[type[Framework]]]:
    """Return the framework classes, eager and compiled, by family."""
    families: dict[str, list[type[Framework]]] = {}
    for name, eager in EAGER.items():
        families[eager[0].family] = [*eager, *COMPILED.get(name, ())]
    return families


def _capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def _listed(reasons: dict[str, str], form: str = "{} ({})") -> str:
    """Return the dtypes as a text, grouped by the reason why they are missing."""
    together: dict[str, list[str]] = {}
    for dtype, why in reasons.items():
        together.setdefault(why, []).append(f"`{dtype}`")
    return ", ".join(form.format(", ".join(names), why) for why, names in together.items())


def _except(promise: Promise) -> list[str]:
    """Return sentences about the frameworks that are exempt from a guarantee, with the reason."""
    where: dict[str, list[str]] = {}
    for family, classes in _families().items():
        ways = {cls.name: promise.reason(cls) for cls in classes}
        if len(set(ways.values())) == 1:
            ways = {family: ways[classes[0].name]}
        for name, why in ways.items():
            if why:
                where.setdefault(why, []).append(WAYS.get(name, name))
    return [f"*Not on {', '.join(names)}: {why}.*" for why, names in where.items()]
