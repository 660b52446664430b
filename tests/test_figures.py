"""The figures that README and pages state are equal to those of their sources.

A figure is a number that someone measured or counted. The function of a sentence returns each
figure as the text that the page has to state, so a page that rounds in another way fails, too.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import math
import re
import statistics
import tokenize
import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import steps
import timing

import uniclip as uc
from cases import GROUPS, TOLERANCE
from compared import tidy
from kit.cpu import FACTOR
from kit.pages import BLOCK
from uniclip import insight

pytestmark = pytest.mark.needs("numpy")
ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "uniclip"
WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
)


class Stated(NamedTuple):
    """A sentence of a page, with ``{}`` in place of each figure, and the function of these."""

    page: str
    text: str
    figures: Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the modules of the documentation and the examples."""
    for folder in ("docs", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


# Where figures come from


def read(name: str) -> str:
    """Return the text of a file, with single spaces."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def found(name: str, pattern: str) -> str:
    """Return what the only group of a pattern matches in a file, equally everywhere."""
    [value] = set(re.findall(pattern, read(name)))
    return value


@cache
def data(name: str) -> Any:
    """Return the data of a JSON file of the documentation."""
    return json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8"))


def tally() -> dict[str, list[str]]:
    """Return how many cases each library gets right, wrong, and so on."""
    return {name: marks for name, *marks in cells(data("compared-pages")["parts"]["tally"])[2:]}


def page_module(name: str) -> Any:
    """Return a module of the documentation."""
    return importlib.import_module(name)


def default(function: Callable[..., Any], name: str) -> Any:
    """Return the default of a parameter."""
    return inspect.signature(function).parameters[name].default


def several(values: Any) -> str:
    """Return numbers as an enumeration."""
    *most, last = (f"{value:g}" for value in values)
    return f"{', '.join(most)}, and {last}"


def rules() -> str:
    """Return the number of built-in rules."""
    return str(len(page_module("rule_presets").PRESETS))


def host_under_fsdp2() -> list[str]:
    """Return the number of parameters of a model on two processes, and the host's time of a clip
    over that of the native function, not clipped and clipped.
    """
    below, above = data("speed-processes")["rows"][-2:]
    ratios = [f"{row['host']['clip_grad_norm_'][1]:.2f}" for row in (below, above)]
    return [re.findall(r"\d+ parameters", above["what"])[0].split()[0], *ratios]


def minutes(*environments: str) -> float:
    """Return how many minutes the tests of environments take on two cores, by their budgets."""
    budgets = [
        float(found("tox.ini", rf" {name}: pytest [^:]*?--cpu-minutes ([\d.]+) "))
        for name in environments
    ]
    return sum(budgets) / 2


def lowest(package: str) -> str:
    """Return the lowest supported version of a package."""
    return found("pyproject.toml", rf'"{package}>=([\d.]+)["; ]')


def pythons() -> list[str]:
    """Return the supported versions of Python."""
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", read("pyproject.toml"))


def main_python() -> str:
    """Return the version of Python on which all frameworks are tested."""
    return found(".github/workflows/tests.yml", r'python-version: "([\d.]+)"')


def newest_python() -> str:
    """Return the version of Python that the newest versions of everything run on."""
    return found("tox.ini", r"testenv:newest\] base_python = python([\d.]+)")


def tritons_of_tox() -> list[str]:
    """Return the versions of Triton that compile the kernels."""
    return re.findall(r"triton==(\d+\.\d+)\.\*", read("tox.ini"))


def first_triton_of(gpus: str) -> str:
    """Return the first version of Triton for the compute capabilities that a row names."""
    firsts = set()
    for major, minor in re.findall(r"(\d+)\.(\d)", gpus):
        row = rf"\({major}, {minor}\): \((\d+, \d+)\)"
        firsts.add(found("src/uniclip/backends/torch/kernels.py", row).replace(", ", "."))
    (first,) = firsts
    return first


def tritons_of_kernels() -> list[str]:
    """Return the versions of Triton that run the kernels."""
    versions = found("src/uniclip/backends/torch/kernels.py", r" _VERSIONS = \{([^}]*)\}")
    return sorted(f"{major}.{minor}" for major, minor in re.findall(r"\((\d+), (\d+)\)", versions))


def compared_version(package: str, parts: int) -> str:
    """Return the first parts of the version that was compared."""
    versions = data("compared-pages")["parts"]["versions"]
    [version] = re.findall(rf"\b{package} ([\d.]+)", versions)
    return ".".join(version.split(".")[:parts])


def torch_of_tests() -> str:
    """Return the version of PyTorch that the tests use, without its last part."""
    return found("constraints.txt", r"torch==(\d+\.\d+)")


def torch_of(environment: str) -> str:
    """Return the version of PyTorch that an environment of tox installs."""
    return found("tox.ini", rf"\[testenv:{environment}\] [^\[]*? deps = torch==([\d.]+)\.\* ")


def version_before(version: str) -> str:
    """Return the minor version before a version."""
    major, minor = map(int, version.split("."))
    return f"{major}.{minor - 1}"


def hundreds(value: float) -> str:
    """Return a number to hundreds."""
    return f"{100 * round(value / 100):,}"


def ends(values: list[float]) -> list[str]:
    """Return the smallest and the largest of numbers, to two digits."""
    return [f"{end:.2g}" for end in (min(values), max(values))]


def count_lines(file: Path) -> int:
    """Return the number of lines of code, without docstrings and comments."""
    lines, begins = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        between = token.type in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        if between or token.type in {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}:
            begins |= between
        else:
            docstring, begins = begins and token.type == tokenize.STRING, False
            lines |= set() if docstring else {*range(token.start[0], token.end[0] + 1)}
    return len(lines)


def size_of_core() -> list[str]:
    """Return the number of lines of the core, to hundreds, and of its files."""
    files = [
        file for file in SOURCE.rglob("*.py") if not {"integrations", "insight"} & {*file.parts}
    ]
    return [hundreds(sum(map(count_lines, files))), str(len(files))]


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table in a text."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]


def compared_norms() -> list[str]:
    """Return the smallest and the largest norm for which libraries were compared."""
    [places] = {
        (norms["float32"][0][0], norms["float32"][0][-1])
        for norms in data("compared-pages")["norms"].values()
    }
    return [tidy(f"{place:g}") for place in places]


def square_layers(model: str) -> list[str]:
    """Return the number and the size of the layers of a benchmark's model."""
    [sizes] = steps.MODELS[model][0].args
    [size] = set(sizes)
    return [str(len(sizes) - 1), f"{size:,}", f"{size:,}"]


def within_on_gpu() -> list[str]:
    """Return which share of PyTorch's time steps of GPT-2 take on a GPU if they clip nothing."""
    shares = [
        row["uniclip"]["gpu_us"] / row["native"]["gpu_us"]
        for row in data("speed-gpu")["rows"]
        if row["what"] == "global norm, GPT-2" and not row["clipped"]
    ]
    return [{2: "half", 3: "a third", 4: "a quarter"}[round(1 / statistics.mean(shares))]]


def wide_network() -> list[str]:
    """Return the width of a benchmark's model, and its parameters in millions."""
    sizes = steps.NETS["wide MLP"]
    parameters = sum((before + 1) * after for before, after in pairwise(sizes))
    return [f"{max(sizes):,}", f"{parameters / 1e6:.0f}"]


def best_limits() -> list[tuple[float, float]]:
    """Return the best limit of each setting, and the mean 90th percentile of its norms."""
    settings = data("choosing")["settings"]
    best = [page_module("choosing_table").best_limit(data("choosing"), one) for one in settings]
    return list(zip(best, [statistics.mean(one["percentiles"]) for one in settings], strict=True))


def spikes_of_figure() -> list[str]:
    """Return what the figures of adaptive rules show: a shift, two spikes, several small ones."""
    drawn = page_module("rule_figures")
    first, largest, *others = drawn.SPIKES.values()
    [size] = set(others)
    return [str(drawn.SHIFT), f"{first:g}", f"{largest:g}", WORDS[len(others)], f"{size:g}"]


def percentages_of_figure() -> list[str]:
    """Return how many steps the limits of a figure clip."""
    [ax] = page_module("figures").which_rule().axes
    return [re.sub(r".* clips (\d+) %", r"\1%", text.get_text()) for text in ax.texts]


# What rules do


def limits_of(name: str) -> np.ndarray:
    """Return the limits of the norms in a rule's figure."""
    shown = page_module("rule_presets").EXAMPLES[name]
    leaves = [np.asarray(leaf) for leaf in shown.leaves]
    params = shown.params and [np.asarray(leaf) for leaf in shown.params]
    return np.ravel(uc.clip(leaves, shown.rule, params)[1].limits)


def last_norms(name: str) -> list[str]:
    """Return the norms of the last block of a rule's figure, before and after."""
    shown = page_module("rule_presets").EXAMPLES[name]
    blocks = page_module("rule_figures").run(shown, 1.0)
    return [f"{np.linalg.norm(parts[-1]):.2g}" for parts in blocks]


def total_norms(name: str) -> list[str]:
    """Return the norms of a rule's figure over all leaves, before and after."""
    shown = page_module("rule_presets").EXAMPLES[name]
    blocks = page_module("rule_figures").run(shown, 1.0)
    return [f"{uc.global_norm(parts):.2g}" for parts in blocks]


def largest_factor(rule: uc.Rule) -> float:
    """Return the largest factor of examples with norms from 1e-4 to 10."""
    return float(np.max(uc.clip(np.geomspace(1e-4, 10, 10_000)[:, None], rule)[1].factors))


def smallest_deaf_z() -> float:
    """Return the smallest z-score, in tenths, at which `log_zscore` never clips a spike."""
    for tenths in range(30, 60):
        clipper = uc.Clipper(uc.log_zscore(z=tenths / 10))
        for norm in [1.0, 1.1] * 60 + [1e9]:
            clipper([np.array([norm])])
        if not clipper.report.clipped:
            return tenths / 10
    pytest.fail("every z-score clips the spike")


def spam_limit(elements: int) -> float:
    """Return the limit of `spam` for an element that was 1 in a number of steps."""
    rule = uc.spam()
    state = rule.init(np.ones(1))
    for _ in range(elements):
        _, state, _ = rule.update(np.ones(1), state)
    return float(np.ravel(rule.update(np.ones(1), state)[2].limits)[0])


def growth_of_adagc() -> float:
    """Return by which share the average of `adagc` rises at most in a step."""
    return (1 - default(uc.adagc, "decay")) * (default(uc.adagc, "ratio") - 1)


def growth_of_quantile() -> float:
    """Return by which share the limit of `by_example_quantile` rises if no example is within it."""
    clipper = uc.Clipper(uc.by_example_quantile())
    limits = []
    for _ in range(2):
        clipper(np.full((4, 1), 1e3))
        limits.append(np.max(clipper.report.limits))
    return float(limits[1] / limits[0]) - 1


def skips_until_warned() -> int:
    """Return after how many skipped steps in a row a `Clipper` warns."""
    clipper = uc.Clipper(uc.by_global_norm(1.0, nonfinite="skip"))
    for step in range(1, 100):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            clipper([np.array([math.nan])])
        if seen:
            return step
    pytest.fail("no warning")


def error_of_percentiles() -> float:
    """Return the largest error of the percentiles of all norms, in percent."""
    norms = np.random.default_rng(0).lognormal(size=40)
    errors = []
    for percentile in (30, 50, 70):
        clipper = uc.Clipper(uc.autoclip(percentile, window=None))
        for norm in norms:
            clipper([np.array([norm])])
        exact = np.percentile(norms, percentile)
        errors.append(abs(float(clipper.report.limits) / exact - 1))
    return 100 * max(errors)


def sizes_of_histograms() -> list[str]:
    """Return the sizes of the states of percentiles of all norms, in kB: float32, float64."""
    rule = uc.autoclip(window=None)
    states = [optree.tree_leaves(rule.init(np.zeros(1, dtype))) for dtype in ("f4", "f8")]
    return [f"{sum(array.nbytes for array in state) / 1000:.0f}" for state in states]


def at_limit(curve: Any) -> str:
    """Return the factor of a curve at the limit, to two digits."""
    [factor] = curve(np, np.ones(1), np.ones(1))
    return f"{factor:.2g}"


# The sentences

README = [
    Stated("README.md", "It has {} published clipping rules:", lambda: [rules()]),
    Stated(
        "README.md",
        "In {} of {} cases at least one function of PyTorch",
        lambda: [tally()["at least one built-in"][1], str(sum(map(len, GROUPS.values())))],
    ),
    Stated("README.md", "uniclip is right in all {}. See", lambda: tally()["uniclip"][:1]),
    Stated(
        "README.md",
        "CPU ({} cores of an {}): time of the clipping call",
        lambda: [str(data("speed-step")["about"][key]) for key in ("cores", "cpu")],
    ),
    Stated(
        "README.md",
        "GPU ({}): GPU time, {}; `attach`",
        lambda: [data("speed-gpu")["about"][key] for key in ("device", "what")],
    ),
    Stated(
        "README.md",
        "(two processes, {} parameters), the host takes {} / {} of",
        host_under_fsdp2,
    ),
    Stated("README.md", "is {} lines of code in {} files.", size_of_core),
    Stated(
        "README.md",
        "share one step of {} lines.",
        lambda: [
            hundreds(
                sum(count_lines(SOURCE / "_core" / f"{name}.py") for name in ("spine", "step"))
            )
        ],
    ),
    Stated("README.md", "with Python {} or later", lambda: [pythons()[0]]),
    Stated(
        "README.md",
        "(Python {}; the tests take about {} minutes on two cores;",
        lambda: [main_python(), WORDS[5 * round(minutes("numpy", "all") / 5)]],
    ),
]
CONTRIBUTING = [
    Stated("CONTRIBUTING.md", "with Python {} or later", lambda: [pythons()[0]]),
    Stated(
        "CONTRIBUTING.md",
        "`python -m tox -e numpy` takes about {}, and is enough",
        lambda: [{1: "a minute"}.get(round(minutes("numpy")), f"{minutes('numpy'):.0f} minutes")],
    ),
    Stated(
        "CONTRIBUTING.md",
        "# Python {}, the newest versions",
        lambda: [newest_python()],
    ),
    Stated("CONTRIBUTING.md", "# PyTorch {}, the lowest version: eager", lambda: [lowest("torch")]),
    Stated(
        "CONTRIBUTING.md",
        "# PyTorch {}, the lowest version that compiles",
        lambda: [torch_of("torch-2-11")],
    ),
    Stated(
        "CONTRIBUTING.md",
        "and `py{}` to `py{}` on each push",
        lambda: [pythons()[end].replace(".", "") for end in (0, -1)],
    ),
    Stated(
        "CONTRIBUTING.md",
        "| {} processes that run the checks",
        lambda: [WORDS[int(found("tests/kit/pool.py", r" RANKS = (\d+) "))]],
    ),
    Stated(
        "CONTRIBUTING.md",
        "(tests must catch {} of {}).",
        lambda: [
            f"{float(found('tox.ini', r'--gate ([0-9.]+) ')):.0%}",
            found("tests/mutants.py", r'"--count", type=int, default=(\d+)'),
        ],
    ),
    Stated(
        "CONTRIBUTING.md",
        "fails at {} times its budget",
        lambda: [{1.5: "one and a half"}.get(FACTOR, str(FACTOR))],
    ),
]
VERSIONS = [
    Stated("docs/install.md", "uniclip needs Python {} or later", lambda: [pythons()[0]]),
    Stated(
        "docs/versions.md",
        "| Python | {} | {} on all frameworks; {} to {} on NumPy; once a month, {} on all "
        "frameworks |",
        lambda: [
            pythons()[0],
            main_python(),
            *(pythons()[end] for end in (0, -1)),
            newest_python(),
        ],
    ),
    *[
        Stated("docs/versions.md", f"| {name} | {{}} |", lambda package=package: [lowest(package)])
        for name, package in {
            "NumPy": "numpy",
            "array-api-compat": "array-api-compat",
            "optree": "optree",
            "TensorFlow": "tensorflow",
            "JAX": "jax",
        }.items()
    ],
    Stated(
        "docs/versions.md",
        "| PyTorch | {} | all tests with {}; once a month, some with {} and {} |",
        lambda: [
            lowest("torch"),
            torch_of_tests(),
            torch_of("lowest-torch"),
            torch_of("torch-2-11"),
        ],
    ),
    Stated(
        "docs/versions.md",
        "| Triton, for NVIDIA GPUs | {} | the results of the kernels with {}; once a month, "
        "compiling them with {} to {} |",
        lambda: [
            tritons_of_kernels()[0],
            found("pyproject.toml", r'"triton==(\d+\.\d+)\.\d+;'),
            *(tritons_of_tox()[end] for end in (0, -1)),
        ],
    ),
    *[
        Stated("docs/versions.md", f"{gpus} | {{}} |", lambda gpus=gpus: [first_triton_of(gpus)])
        for gpus in ("| B300, DGX Spark | 10.3, 12.1", "RTX 50 | 10.0, 12.0", "| Thor | 11.0")
    ],
    Stated(
        "docs/versions.md",
        "| {} to {} | yes | the graph",
        lambda: [lowest("torch"), version_before(torch_of("torch-2-11"))],
    ),
    Stated("docs/versions.md", "| from {} | yes | in one", lambda: [torch_of("torch-2-11")]),
    Stated("docs/use-it-with-pytorch.md", "| case | PyTorch {} |", lambda: [torch_of_tests()]),
    Stated(
        "docs/use-it-with-pytorch.md",
        "Tests with Stable-Baselines3 {}, TRL {}, and timm {} (",
        lambda: [lowest("stable-baselines3"), lowest("trl"), lowest("timm")],
    ),
    Stated("docs/rl-and-llm.md", "`GRPOTrainer` of TRL {};", lambda: [lowest("trl")]),
    Stated(
        "docs/compared.md",
        "PyTorch {}, TensorFlow {}, Keras {}, JAX {} with optax {}, MLX {}, timm",
        lambda: [
            *(compared_version(name, 2) for name in ("torch", "tensorflow", "keras", "jax")),
            compared_version("optax", 3),
            compared_version("mlx", 2),
        ],
    ),
]
COUNTS = [
    Stated("docs/first-steps.md", "any of [{} rules]", lambda: [rules()]),
    Stated("docs/index.md", "doc {} rules: the figure,", lambda: [rules()]),
    Stated(
        "docs/the-four-choices.md",
        "`hard`: min(1, c/n), {} others,",
        lambda: [WORDS[len(uc.curves.__all__) - 1]],
    ),
    Stated(
        "docs/rules/index.md",
        "show norms over {} steps;",
        lambda: [str(page_module("rule_figures").LENGTH)],
    ),
    Stated("docs/compared.md", "right in all {} cases.", lambda: tally()["uniclip"][:1]),
    Stated(
        "docs/compared.md",
        "is wrong, without an error, in {}. :::",
        lambda: [tally()["at least one built-in"][1]],
    ),
    Stated("docs/compared.md", "The {} usual cases,", lambda: [str(len(GROUPS["usual"]))]),
    Stated(
        "docs/compared.md",
        "a relative error of at most {} (float16: {}, bfloat16: {}).",
        lambda: [
            tidy(f"{tolerance:.0e}")
            for tolerance in (
                GROUPS["usual"][0].tolerance,
                TOLERANCE["float16"],
                TOLERANCE["bfloat16"],
            )
        ],
    ),
    Stated("docs/compared.md", "float32 gradients from {} to {} and", compared_norms),
    Stated("docs/compared.md", "two elements grows from {} to {}.", compared_norms),
    Stated(
        "docs/use-it-on-many-processes.md",
        "for some steps on {} processes, with NaN",
        lambda: [WORDS[int(found("tests/kit/pool.py", r" RANKS = (\d+) "))]],
    ),
    Stated(
        "docs/use-it-on-many-processes.md",
        "those of one process to {} of their size",
        lambda: [found("tests/kit/processes.py", r" CLOSE = (\S+) ")],
    ),
    Stated(
        "docs/use-it-on-many-processes.md",
        "in JAX on {} devices",
        lambda: [found("tests/conftest.py", r"device_count=(\d+)")],
    ),
]
MEASURED = [
    Stated(
        "docs/performance.md",
        "the median over {} rounds of {} calls, with its quartiles. Programs compile {} after",
        lambda: [
            found("benchmarks/speed.py", r'"--rounds", type=int, default=(\d+)'),
            str(timing.CALLS),
            {2: "twice"}[int(found("benchmarks/many.py", r" BUILDS = (\d+) "))],
        ],
    ),
    Stated(
        "docs/performance.md",
        "an MLP of {} layers of up to {} units, with a batch of {}; an LSTM of {} units; "
        "{} layers of {} x {}; {} of {} x {}.",
        lambda: [
            WORDS[len(steps.LAYERS) - 1],
            str(max(steps.LAYERS)),
            str(steps.MODELS["small MLP"][1][0]),
            found("benchmarks/steps.py", r"nn\.LSTM\(\d+, (\d+)\)"),
            *square_layers("50 x 16 k"),
            *square_layers("4 x 1 M"),
        ],
    ),
    Stated(
        "docs/use-it-with-pytorch.md",
        "compute capability {} or more",
        lambda: [
            found("src/uniclip/backends/torch/kernels.py", r" _VOLTA, _HOPPER = \((\d+), 0\)")
        ],
    ),
    Stated("docs/performance.md", "within the limit takes {} of PyTorch's time", within_on_gpu),
    Stated(
        "docs/performance.md",
        "layers of up to {} units ({} million parameters)",
        wide_network,
    ),
    Stated(
        "docs/choose-a-limit.md",
        "before the first run: {} settings of small",
        lambda: [str(len(data("choosing")["settings"]))],
    ),
    Stated(
        "docs/choose-a-limit.md",
        "bad batches), {} seeds, and {} limits.",
        lambda: [str(data("choosing")["seeds"]), WORDS[len(data("choosing")["limits"])]],
    ),
    Stated(
        "docs/choose-a-limit.md",
        "- **{} settings can't rank",
        lambda: [WORDS[len(data("choosing")["settings"])].capitalize()],
    ),
    Stated(
        "docs/choose-a-limit.md",
        "raises the mean regret from {} to {}:",
        lambda: [
            page_module("choosing_table").regrets(data("choosing"), name)[0]
            for name in ("0.25, 1, and 4", "0.5, 2, and 8")
        ],
    ),
    Stated(
        "docs/choose-a-limit.md",
        "was between {} and {} times the 90th percentile",
        lambda: ends([best / percentile for best, percentile in best_limits()]),
    ),
    Stated(
        "docs/choose-a-limit.md",
        "best limits were between {} and {}. Three",
        lambda: ends([best for best, _ in best_limits()]),
    ),
    Stated(
        "docs/which-rule.md",
        "with a standard deviation of {}. The others are lognormal: the standard deviation of "
        "their logarithms is {} (usual) or {} (wild). Steps are independent. Each rule gets {} of "
        "them, and the last {} count.",
        lambda: [
            f"{getattr(page_module('clip_shares'), name):{form}}"
            for name, form in zip(
                ("CALM", "USUAL", "WILD", "STEPS", "COUNTED"), "ggg,,", strict=True
            )
        ],
    ),
]
RULES = [
    Stated(
        "docs/rules/adaptive.md",
        "around 2 from step {} on, one spike of {} times and one of {} times the usual norm, {} of "
        "{} times in a row,",
        spikes_of_figure,
    ),
    *[
        Stated("docs/rules/adaptive.md", text, lambda: [spikes_of_figure()[2]])
        for text in (
            "The spike of {} times becomes 0",
            "only the spike of {} times is clipped",
            "after the spike of {} times, it is",
        )
    ],
    *[
        Stated(
            "docs/rules/adaptive.md",
            text,
            lambda: [str(default(uc.skip_spikes, "window"))],
        )
        for text in ("raises the threshold for {} steps", "raise the threshold for {} steps")
    ],
    Stated(
        "docs/rules/adaptive.md",
        "than the {} of steps that a z-score of {} suggests",
        lambda: [
            f"{1 - statistics.NormalDist().cdf(default(uc.zclip, 'z')):.1%}",
            str(default(uc.zclip, "z")),
        ],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "jump within about {} steps",
        lambda: [WORDS[round(1 / (1 - default(uc.log_zscore, "decay")))]],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "a change is followed in {} steps",
        lambda: [str(default(uc.percentile_clipping, "window"))],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "After {} steps of global clipping",
        lambda: [str(default(uc.adagc, "warmup"))],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "no z-score exceeds {} with the default decay",
        lambda: [f"{smallest_deaf_z():.1f}"],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "smaller norms, rises by {} per step",
        lambda: [f"{growth_of_adagc():.1%}"],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "rises by at most {} per step, so it takes about {} steps to double",
        lambda: [
            f"{growth_of_adagc():.1%}",
            hundreds(math.log(2) / math.log1p(growth_of_adagc())),
        ],
    ),
    Stated(
        "src/uniclip/presets/adaptive.py",
        "``(1 - decay)·(ratio - 1)``, {}, per step",
        lambda: [f"{growth_of_adagc():.1%}"],
    ),
    Stated(
        "src/uniclip/limits/percentiles.py",
        "takes {} kB for each norm, or {} kB in float64",
        sizes_of_histograms,
    ),
    Stated(
        "docs/rules/adaptive.md",
        "to every small norm and rises by at most {} per step",
        lambda: [f"{default(uc.norm_growth, 'ratio') - 1:.0%}"],
    ),
    Stated(
        "docs/rules/adaptive.md",
        "the limit is {} times an element's usual size after {} steps, and {} times in the end",
        lambda: [
            f"{spam_limit(default(uc.spam, 'warmup')):.0f}",
            str(default(uc.spam, "warmup")),
            f"{math.sqrt(default(uc.spam, 'factor')):.0f}",
        ],
    ),
    Stated(
        "docs/rules/examples.md",
        "and the limit {}, the total of 1",
        lambda: [f"{limits_of('by_example_layer_norm')[0]:.2g}"],
    ),
    Stated(
        "docs/rules/examples.md",
        "to a norm of about 1; the one of norm {} grows to {} :align:",
        lambda: last_norms("auto_s"),
    ),
    Stated(
        "docs/rules/examples.md",
        "The limit climbs from {} to the median",
        lambda: [str(default(uc.by_example_quantile, "start"))],
    ),
    Stated(
        "docs/rules/examples.md",
        "The limit rises by at most {} per step",
        lambda: [{0.1: "a tenth"}[round(growth_of_quantile(), 1)]],
    ),
    Stated(
        "docs/rules/examples.md",
        "at 0.01, a gradient of norm 0.001 is multiplied by {}.",
        lambda: [f"{float(uc.clip(np.array([[1e-3]]), uc.auto_s(1.0, 0.01))[1].factors[0]):.0f}"],
    ),
    Stated(
        "docs/rules/examples.md",
        "to a norm of about 1; the one of norm {} stays small, at {} :align:",
        lambda: last_norms("psac"),
    ),
    Stated(
        "docs/rules/examples.md",
        "up to {} for $r = 0.1$, and up to {} for $r = 0.01$.",
        lambda: [f"{largest_factor(uc.psac(r=r)):.1f}" for r in (0.1, 0.01)],
    ),
    Stated(
        "docs/rules/fixed.md",
        "share one norm of {} and are scaled by the same factor, to a norm of {} :align:",
        lambda: total_norms("by_global_norm"),
    ),
    Stated(
        "docs/rules/fixed.md",
        "$c/(c + n)$ | {} | ",
        lambda: [at_limit(uc.curves.soft)],
    ),
    Stated(
        "docs/rules/fixed.md",
        r"$1/\sqrt{1 + (n/c)^2}$ | {} | ",
        lambda: [at_limit(uc.curves.smooth)],
    ),
    Stated(
        "docs/rules/fixed.md",
        r"$(c/n) \tanh(n/c)$ | {} | ",
        lambda: [at_limit(uc.curves.tanh)],
    ),
    Stated(
        "docs/rules/relative.md",
        "have the limits {} at the ratio {} :align:",
        lambda: [several(limits_of("agc")), str(default(uc.agc, "ratio"))],
    ),
    Stated(
        "docs/rules/relative.md",
        "and four times have the limits {} :align:",
        lambda: [several(limits_of("cowclip"))],
    ),
]
DEFAULTS = [
    Stated(
        "docs/moving-from.md",
        "none; the same defaults, {} and {} |",
        lambda: [
            tidy(f"{default(uc.agc, 'ratio'):g}"),
            tidy(f"{default(uc.agc, 'eps'):.0e}"),
        ],
    ),
    Stated(
        "docs/moving-from.md",
        "| within {}; the default window is {} |",
        lambda: [
            {1: "half a percent"}[math.ceil(2 * error_of_percentiles())],
            f"{default(uc.autoclip, 'window'):,}",
        ],
    ),
    Stated(
        "docs/moving-from.md",
        "MaxText may skip one step sooner, its {}th |",
        # Our warm-up is half the window, after which the next step may be skipped.
        lambda: [str(default(uc.skip_spikes, "window") // 2)],
    ),
    *[
        Stated(page, text, lambda: [WORDS[int(default(uc.skip_spikes, "z"))]])
        for page, text in (
            ("docs/rl-and-llm.md", "steps more than {} standard deviations above"),
            ("docs/skip-a-step.md", "a spike: {} standard deviations above"),
        )
    ],
    Stated(
        "docs/skip-a-step.md",
        "After {} skipped steps in a row,",
        lambda: [WORDS[skips_until_warned()]],
    ),
    Stated(
        "docs/promises.md",
        "so does each {}th step without another one. A recorder waits once per {} steps",
        lambda: [
            found("src/uniclip/clipper.py", r" MAX_PENDING_REPORTS = (\d+) "),
            str(default(insight.Recorder, "every")),
        ],
    ),
    Stated(
        "docs/log-and-plot.md",
        "reads them once per {} steps",
        lambda: [str(default(insight.Recorder, "every"))],
    ),
    Stated(
        "docs/what-happened-at-step-n.md",
        "the median of the last {} (five times from the eleventh to the twentieth step) and {} "
        "standard",
        lambda: [
            {100: "hundred"}[default(insight.spikes, "window")],
            WORDS[default(insight.spikes, "z")],
        ],
    ),
    Stated(
        "docs/use-it-on-many-processes.md",
        "warm-up, {} steps by default, `uc.adagc`",
        lambda: [str(default(uc.adagc, "warmup"))],
    ),
    Stated(
        "docs/use-it-with-optax.md",
        "clips nothing in its first {} steps)",
        lambda: [str(default(uc.zclip, "warmup"))],
    ),
]
STATED = [*README, *CONTRIBUTING, *VERSIONS, *COUNTS, *MEASURED, *RULES, *DEFAULTS]
FIRST = [
    Stated(
        page,
        "it is NaN at step {}. With clipping, it falls to 0, and the network classifies {} of the "
        "digits correctly. Bottom: the gradient norms",
        lambda: [str(hero().steps), share_in_picture()],
    )
    for page in ("README.md", "docs/index.md")
] + [
    Stated("README.md", "without clipping, they exceed {}.", lambda: [f"1e{hero().power}"]),
    Stated("docs/index.md", "Without clipping, they exceed {}.", lambda: [f"1e{hero().power}"]),
]
"""The texts for those who can't see the first figure."""
DRAWN = [
    Stated(
        "docs/which-rule.md",
        "two safety nets clip {} and {} of the steps, a normalizer clips {} :align:",
        percentages_of_figure,
    ),
]
"""Texts about figures whose programs need the digits of the demo extra."""


class Trained(NamedTuple):
    """What the training shows from which the first figure is drawn."""

    steps: int
    power: int
    share: float


@cache
def hero() -> Trained:
    """Return what the first figure shows, from its training."""
    example = importlib.import_module("exploding_rnn")
    task = example.make_task(seed=0, steps=example.STEPS)
    unclipped, clipped = (
        example.train("numpy", example.use_numpy(), task, limit)
        for limit in (math.inf, example.MAX_NORM)
    )
    power = math.floor(math.log10(max(unclipped.norms)))
    return Trained(len(unclipped.losses), power, clipped.accuracy)


def share_in_picture() -> str:
    """Return how many digits the network of the first figure reads, in the picture."""
    return found("docs/_static/hero-light.svg", r"<!-- clipped: reads (\d+%) of the digits -->")


def pattern(stated: Stated) -> str:
    """Return the pattern of a sentence, with a group for each figure."""
    return re.escape(stated.text).replace(r"\{\}", "([^|]{1,40}?)")


def check(stated: Stated) -> None:
    """Require that a page has a sentence, each time with the figures of its source."""
    figures = tuple(stated.figures())
    assert len(figures) == stated.text.count("{}") > 0
    occurrences = re.finditer(pattern(stated), read(stated.page))
    assert {occurrence.groups() for occurrence in occurrences} == {figures}


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: f"{stated.page}: {stated.text}")
def test_figures(stated: Stated) -> None:
    """A page has a sentence, and states the figures of its source."""
    check(stated)


def test_the_compared_cases() -> None:
    """The recorded results of each library cover the current cases."""
    counts = tally()
    del counts["at least one built-in"]
    assert {sum(map(int, marks)) for marks in counts.values()} == {sum(map(len, GROUPS.values()))}


FEATURES = {
    "Finite gradients of 1e30": "A finite gradient of 1e30",
    "bfloat16, measured in float32": "The norm of 500 bfloat16 tensors after clipping",
    "Sparse, with a row that occurs twice": "A row that occurs twice",
}
"""The rows of the table of features that one of the compared cases decides."""


@pytest.mark.parametrize("feature", FEATURES)
def test_the_features_of_libraries(feature: str) -> None:
    """The table of features has the recorded marks of the libraries, with errors as wrong."""
    page = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    table = {name: marks for name, *marks in cells(page)}
    blocks = "\n\n".join(data("compared-pages")["parts"].values())
    [results] = re.findall(
        rf"^\*\*{FEATURES[feature]}\*\*:.*\n\n((?:- .*\n?)+)", blocks, re.MULTILINE
    )
    marks = dict(re.findall(r"\*(\w+)\* +(\S+)", results.replace("error", "✗")))
    assert marks.keys() == tally().keys() - {"at least one built-in"}
    libraries = dict(zip(table[""], table[feature], strict=True))
    assert {name: libraries[name] for name in marks} == marks


def test_speed() -> None:
    """The README has the measured ratios of the page, and lists where uniclip is slower."""
    names = [f"speed-{name}" for name in ("step", "rules", "processes", "growth", "gpu")]
    measured = {name: data(name) for name in [*names, "launches"]}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("- **Fast.**") : readme.index("- **Small")]
    tables = page_module("performance_tables").parts(measured)
    assert cells(said) == cells(tables["readme"])

    rows = [row for row in data("speed-step")["rows"] if row["framework"] == "torch"]
    slow = {
        row["what"]
        for row in rows
        if any(round(ratio[1], 2) < 1 for ratio in row["times"].values())
    }
    listed = re.findall(r"Slower: [^(]*\(([^)]+)\)", said)
    assert slow == {name for names in listed for name in names.split(", ")}


@pytest.mark.needs("torch")  # The environments of frameworks have the demo extra.
@pytest.mark.parametrize("stated", DRAWN, ids=lambda stated: f"{stated.page}: {stated.text}")
def test_texts_of_figures(stated: Stated) -> None:
    """A page describes what its figure shows."""
    check(stated)


@pytest.mark.needs("torch")
def test_the_first_figure() -> None:
    """The first figure shows the training of the example, in both themes, and texts describe it.

    One test, since the training takes seconds.
    """
    # Which digits are read depends on the processor: one in fifty more or less.
    share = share_in_picture()
    assert abs(hero().share - int(share.removesuffix("%")) / 100) < 0.03

    drawn = {
        f"not clipped: NaN at step {hero().steps}",
        f"clipped: reads {share} of the digits",
        f"above $10^{{{hero().power}}}$",
    }
    for theme in ("light", "dark"):
        picture = (ROOT / "docs" / "_static" / f"hero-{theme}.svg").read_text(encoding="utf-8")
        assert drawn <= set(re.findall("<!-- (.*) -->", picture))
    for stated in FIRST:
        check(stated)


UNITS = (
    *("%", "ms", "µs", "s", "seconds", "minutes?", "hours?", "kB", "MB", "GB", "lines of code"),
    "times (?:as|faster|slower|less|more)",
)
MEASUREMENT = re.compile(
    rf"(?:\d[\d.,]*[ -]?|\b(?:a|some|half an?|{'|'.join(WORDS)})[ -])(?:{'|'.join(UNITS)})(?!\w)",
    re.IGNORECASE,
)
"""A time, a size, a percentage, or a ratio."""
ADVICE = {"docs/choose-a-limit.md": "ideally 1% or 2% of the steps"}
"""What looks like a measurement and isn't one."""


def prose(page: str) -> str:
    """Return the text of a page without what the tests run, inline code, and styles."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    text = re.sub(r"`[^`\n]+`|style=\S+", "", BLOCK.sub("", text))
    return " ".join(text.split())


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "docs").rglob("*.md")
        if not file.relative_to(ROOT / "docs").as_posix().startswith("_")
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_measurement_has_a_source(page: str) -> None:
    """A page has no time, size, percentage, or ratio that isn't compared with its source."""
    text = prose(page)
    for stated in (*STATED, *FIRST, *DRAWN):
        if stated.page == page:
            compared = re.sub(r"`[^`]+`", "", stated.text)
            text = re.sub(pattern(stated._replace(text=" ".join(compared.split()))), "", text)
    text = text.replace(ADVICE.get(page, "\n"), "")
    assert MEASUREMENT.findall(text) == []
