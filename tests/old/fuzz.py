"""A fuzz of every rule against an oracle in higher precision that shares no code with uniclip.

    python tests/fuzz.py --framework numpy --cases 100000 --seed 1
    python tests/fuzz.py --framework torch --seed 1 --case 4711
    python tests/fuzz.py --planted

Each case is made of its seed and its number alone. What is wrong is printed as a line that runs it again.
"""
# ruff: noqa: T201, EM101, TRY003, C901, PLR0911, BLE001 - a script prints; a step has many ways to go wrong

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import fuzz_oracle as oracle
import fuzz_planted
import uniclip as uc
from frameworks import KNOWN, Framework, JAXx64
from fuzz_cases import Case, Slot, drawn_case, plans_of, replaced, walk
from fuzz_checks import Mismatch, check_leaves, check_report, same_tree, seen_of
from fuzz_limits import Inconclusive
from fuzz_mistakes import refuse

LAYOUTS = {
    "NumPy": ("C",) * 4 + ("F", "backwards", "strided", "fixed", "repeated", "scalar"),
    "PyTorch": ("C",) * 4 + ("F", "strided", "repeated"),
}
FLUSHING = {"TensorFlow", "JAX"}
"""The families whose own kernels take subnormal numbers for 0."""


class JAXEagerx64(JAXx64):
    """JAX outside of jit, with 64-bit types."""

    name = "jax-x64"
    same_objects = True
    raises = True
    traced = False

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


FRAMEWORKS = {**{name: cls for name, cls in KNOWN.items() if name != "numpy-readonly"}, "jax-x64": JAXEagerx64}


@dataclass
class Tally:
    """What came of the cases."""

    cases: int = 0
    steps: int = 0
    inconclusive: Counter[str] = field(default_factory=Counter)
    maybes: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    """How many steps had to be refused, and were."""
    failures: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


def machine_of(fw: Framework) -> oracle.Machine:
    """Return what the oracle has to know of a framework."""
    axis = 0 if fw.family == "PyTorch" else -1
    return oracle.Machine(fw.family in FLUSHING, fw.default_float, axis, exact=fw.family != "MLX")


def case_of(fw: Framework, seed: int, number: int) -> Case:
    """Return a case, always the same one."""
    rng = np.random.default_rng([seed, number])
    layouts = LAYOUTS.get(fw.family, ("C",)) if not fw.traced else ("C",)
    ways: tuple[str, ...] = ("plain", "plain", "summed")
    ways += () if fw.traced else ("holder", "familiar", *(["in place"] if fw.writes else []))
    dtypes = [one for one in fw.dtypes if fw.family != "MLX" or one != "float64"]  # which no complex dtype there holds
    case = drawn_case(rng, dtypes, layouts, ways, 8 if fw.traced else 1, few=fw.family == "JAX" or fw.traced)
    plans = plans_of(case.plan)
    sums = case.plan.kind == "rule" and case.plan.scope.kind in {"row", "example"} and not case.plan.remembers
    example = all(slot.shape[:1] == case.slots[0].shape[:1] for slot in case.slots) if case.slots else False
    if case.way == "summed" and not (sums and example and all(all(v is not None for v in s) for s in case.steps)):
        case.way = "plain"
    if case.way == "in place" and any(slot.dtype.startswith("int") for slot in case.slots):
        case.way = "plain"
    if fw.traced and any(plan.policy == "raise" for plan in plans):
        case.way = "refused"
    return case


def array_of(fw: Framework, values: np.ndarray, slot: Slot) -> Any:
    """Return an array of the framework, as it lies in memory in many ways."""
    with np.errstate(all="ignore"):
        array = fw.array(values, slot.dtype)
    if slot.layout == "C" or not slot.shape:
        return array[()] if slot.layout == "scalar" and isinstance(array, np.ndarray) else array
    return _laid_out(array, slot.layout)


def _laid_out(array: Any, layout: str) -> Any:
    numpy = isinstance(array, np.ndarray)
    match layout:
        case "F":
            return np.asfortranarray(array) if numpy else array.mT.contiguous().mT if array.ndim > 1 else array
        case "strided":
            wide = np.repeat(array, 2, axis=0) if numpy else array.repeat_interleave(2, 0)
            return wide[::2]
        case "backwards":
            return array[::-1].copy()[::-1]
        case "fixed":
            array.flags.writeable = False
        case "repeated" if array.shape[0]:
            return np.broadcast_to(array[:1], array.shape) if numpy else array[:1].expand(array.shape)
    return array


class Run:
    """A case on a framework."""

    def __init__(self, fw: Framework, case: Case, tally: Tally) -> None:
        self.fw, self.case, self.tally, self.machine = fw, case, tally, machine_of(fw)
        self._tie()
        self._box()
        self.rule, self.plan = case.rule, case.plan
        self.state: Any = None
        self.own: Any = None
        self.clipper = uc.Clipper(case.rule)
        self.compiled = fw.compiled(self._update)
        self.params, self.own_params = None, {}
        if any(limit[0] in {"relative", "trust"} for plan in plans_of(case.plan) for limit in [plan.limit]):
            self.params = self._tree(case.params)
            self.own_params = {leaf.path: leaf for leaf in self._leaves(self.params)}

    def _tie(self) -> None:
        """Make the limit one of the norms that the first step has."""
        if self.case.tie is None:
            return
        leaves = self._leaves(self._tree(self.case.steps[0]))
        with contextlib.suppress(Inconclusive):
            norms = oracle.norms_of(self.case.plan, leaves, self.machine)[0]
            sizes = np.concatenate([np.ravel(n.hi) for n in norms]) if norms else np.zeros(0)
            if sizes.size and np.isfinite(size := sizes[int(self.case.tie * sizes.size)]):
                self.case.rule = replace(self.case.rule, limit=uc.limits.Constant(float(size)))
                self.case.plan = replace(self.case.plan, limit=("constant", float(size)))

    def _box(self) -> None:
        """Make the limit an array."""
        kind, value = self.case.plan.limit[0], self.case.plan.limit[-1]
        if self.case.boxed and self.case.plan.kind == "rule" and kind == "constant" and 1e-30 < value < 1e30:
            value = float(np.float32(value))
            self.case.rule = replace(self.case.rule, limit=uc.limits.Constant(self.fw.array(value, "float32")))
            self.case.plan = replace(self.case.plan, limit=(kind, value))

    def _tree(self, values: list[np.ndarray | None]) -> Any:
        made = [
            None if one is None else array_of(self.fw, one, slot)
            for one, slot in zip(values, self.case.slots, strict=True)
        ]
        if self.case.twice and values is not self.case.params:
            first, second = self.case.twice
            made[second] = made[first]
        return replaced(self.case.tree, lambda slot: made[slot.number])

    def _leaves(self, tree: Any) -> list[oracle.Leaf]:
        return [
            oracle.leaf_of(path, self.fw.numpy(array), self.fw.dtype(array), self.machine) for path, array in walk(tree)
        ]

    def _update(self, grads: Any, state: Any, params: Any, loss: Any) -> Any:
        if self.case.way == "summed":
            return (*uc.clip_and_sum(grads, self.rule, params), None)
        clipped, state, report = self.rule.update(grads, state, params, loss=loss)
        return clipped, report, state

    def steps(self) -> None:
        """Take all steps."""
        for number, values in enumerate(self.case.steps):
            if number == self.case.saved:
                self._save()
            self.step(values, self.case.losses[number])
            self.tally.steps += 1

    def _save(self) -> None:
        """Save what is remembered, and load it into another clipper."""
        if self.case.way == "holder":
            saved = json.loads(json.dumps(self.clipper.state_dict()))
            self.clipper = uc.Clipper(self.case.rule)
            self.clipper.load_state_dict(saved)

    def step(self, values: list[np.ndarray | None], loss: float | None) -> None:
        """Take a step, and check it."""
        fw, case = self.fw, self.case
        grads = self._tree(values)
        leaves = self._leaves(grads)
        old = [np.array(fw.numpy(array)) for _, array in walk(grads)]
        in_place = case.way == "in place"
        again = _again(grads) if in_place else set()  # what is there twice counts once, and is absent elsewhere
        leaves = [leaf for number, leaf in enumerate(leaves) if number not in again]
        refused = case.way == "refused" or (in_place and self._fixed(grads))
        try:
            clipped, report = self._call(grads, loss)
        except FloatingPointError:
            outcome = self._outcome(leaves, loss, None)
            if outcome.finite or not any(plan.policy == "raise" for plan in plans_of(self.plan)):
                raise
            self.tally.errors += 1
            self._unchanged(grads, old, in_place and self.plan.kind == "chain")
            return
        except Exception as error:
            # torch.compile wraps the error.
            if not refused or not (isinstance(error, TypeError) or "has to look at the norm" in str(error)):
                raise
            self.tally.errors += 1
            self._unchanged(grads, old, False)
            return
        if refused:
            raise Mismatch("no error", "for what cannot be changed, or has no value")
        if report is None and not leaves:
            return
        outcome = self._outcome(leaves, loss, report)
        if (
            not outcome.finite
            and "raise" in {plan.policy for plan in plans_of(self.plan)}
            and self._raises(outcome, self.plan)
        ):
            raise Mismatch("no error", "for gradients that are not finite")
        if not in_place:
            self._unchanged(grads, old, False)
        same_tree(grads, clipped, ordered=not fw.traced)
        new = [array for number, (_, array) in enumerate(walk(clipped)) if number not in again]
        given = [array for number, array in enumerate(old) if number not in again]
        check_leaves(outcome.leaves, given, new, fw, self.machine)
        check_report(outcome, self.plan, report, fw)
        if fw.same_objects and case.way in {"plain", "holder", "familiar"} and outcome.finite:
            for leaf, one, other in zip(outcome.leaves, [a for _, a in walk(grads)], new, strict=True):
                if (
                    np.all(leaf.same)
                    and self.plan.kind == "rule"
                    and leaf.shape
                    and fw.dtype(one) == leaf.dtype
                    and one is not other
                    and np.size(leaf.same)
                ):
                    raise Mismatch("identity", f"{leaf.path} is another array of the same values")
        self.own = outcome.state

    def _raises(self, outcome: oracle.Outcome, plan: oracle.Plan) -> bool:
        parts = plan.parts if plan.kind == "chain" else (plan,)
        outcomes = outcome.parts if plan.kind == "chain" else [outcome]
        return any(
            plans_of(part)[0].policy == "raise" and one.measured and not one.finite
            for part, one in zip(parts, outcomes, strict=True)
        )

    def _call(self, grads: Any, loss: float | None) -> tuple[Any, Any]:
        way, memory, params = self.case.way, self.rule.memory, self.params
        more = {} if loss is None else {"loss": loss}
        if way == "summed":
            clipped, report, _ = self.compiled(grads, None, params, None)
            return clipped, report
        if way == "holder":
            return self.clipper(grads, params, **more), self.clipper.report
        if way == "in place" and not memory:
            return grads, uc.clip_(grads, self.rule, params)
        if way == "familiar" and self._familiar():
            return self._by_function(grads)
        if not memory and not self.fw.traced:
            return uc.clip(grads, self.rule, params)
        if self.state is None:
            self.state = self.rule.init(grads)
        if way == "in place":
            clipped, self.state, report = self.rule.update(grads, self.state, params, in_place=True, **more)
            return grads, report
        loss_array = None if loss is None else self.fw.array(loss, "float32")
        clipped, report, self.state = self.compiled(grads, self.state, params, loss_array)
        return clipped, report

    def _familiar(self) -> bool:
        """Return whether there is a function for the rule."""
        plan, limit = self.plan, self.plan.limit[0]
        usual = plan.kind == "rule" and (plan.curve, plan.policy, plan.power, limit) == (
            "hard",
            "propagate",
            0,
            "constant",
        )
        return usual and plan.scope.kind in {"all", "leaf"}

    def _by_function(self, grads: Any) -> tuple[Any, Any]:
        """Clip by a familiar function; the report is that of measuring."""
        report = self.rule.update(grads, self.rule.init(grads))[2]
        limit, p = self.rule.limit.value, self.plan.p
        if self.plan.scope.kind == "leaf":
            return uc.clip_by_norm(grads, limit, ord=p), report
        known = uc.global_norm(grads, ord=p) if self.case.boxed else None
        clipped, norm = uc.clip_by_global_norm(grads, limit, ord=p, norm=known)
        return clipped, uc.Report(norm, *tuple(report)[1:])

    def _outcome(self, leaves: list[oracle.Leaf], loss: float | None, report: Any) -> oracle.Outcome:
        seen = None if report is None else seen_of(self.plan, report, self.fw)
        given = oracle.Step(self.machine, self.own_params, loss, seen, self.tally.maybes)
        if self.case.way == "summed":
            return oracle.reduced(self.plan, leaves, given, mean=False)
        return oracle.clip(self.plan, leaves, self.own, given)

    def _fixed(self, grads: Any) -> bool:
        """Return whether one of the arrays that are to be clipped cannot be changed."""
        where = self.plan.where or (lambda path, leaf: True)
        return (
            self.fw.family == "NumPy"
            and any(
                isinstance(array, np.generic) or not array.flags.writeable or _repeats(array)
                for path, array in walk(grads)
                if where(path, array)
            )
        ) or (self.fw.family == "PyTorch" and any(_repeats(array) for path, array in walk(grads) if where(path, array)))

    def _unchanged(self, grads: Any, old: list[np.ndarray], chained: bool) -> None:
        for before, (path, array) in zip(old, walk(grads), strict=True):
            after = np.asarray(self.fw.numpy(array))
            wide = np.complex128 if after.dtype.kind == "c" else np.float64
            if not chained and not np.array_equal(before.astype(wide), after.astype(wide), equal_nan=True):
                raise Mismatch("input changed", f"{path}")


def _again(grads: Any) -> set[int]:
    """Return the numbers of the leaves that are the same array as one before."""
    seen = [id(array) for _, array in walk(grads)]
    return {number for number, one in enumerate(seen) if one in seen[:number]}


def _repeats(array: Any) -> bool:
    strides = array.strides if isinstance(array, np.ndarray) else array.stride()
    return (
        any(stride == 0 and size > 1 for stride, size in zip(strides, array.shape, strict=True))
        and 0 not in array.shape
    )


def run_case(fw: Framework, seed: int, number: int, tally: Tally) -> None:
    """Run a case; tell the tally what came of it."""
    tally.cases += 1
    if number % 25 == 24 and not fw.traced:
        run_mistake(fw, seed, number, tally)
        return
    case = case_of(fw, seed, number)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("error")
            Run(fw, case, tally).steps()
    except Inconclusive as why:
        tally.inconclusive["".join(c for c in str(why) if not c.isdigit()).strip()] += 1
    except Mismatch as error:
        tally.failures.setdefault(error.kind, []).append((number, f"{case}\n    {error}"))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {place.filename.rpartition('/')[2]}:{place.lineno}"
        tally.failures.setdefault(kind, []).append((number, f"{case}\n    {error}"))


def run_mistake(fw: Framework, seed: int, number: int, tally: Tally) -> None:
    """Make a mistake in place of a case; tell the tally what came of it."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        wrong = refuse(fw, np.random.default_rng([seed, number]))
    tally.errors += 1
    if wrong:
        tally.failures.setdefault(f"mistake, {wrong.partition(':')[0]}", []).append((number, wrong))


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that were asked for; return how many kinds of failures there are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="numpy")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this one only, and show its error")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--planted", action="store_true", help="plant faults in copies of uniclip, and look for them")
    parser.add_argument("--known", type=json.loads, default=[], help="numbers of cases to leave out, in JSON")
    parser.add_argument("--found", help="a file to write the numbers of the cases that fail to")
    given = parser.parse_args(arguments)
    if given.planted:
        return fuzz_planted.search(given.cases, given.seed)
    fw, tally = FRAMEWORKS[given.framework](), Tally()
    with fw.context():
        if given.case is not None:
            case = case_of(fw, given.seed, given.case)
            if given.case % 25 == 24 and not fw.traced:
                run_mistake(fw, given.seed, given.case, tally)
                print(tally.failures or "passed")
                return len(tally.failures)
            with np.errstate(all="ignore"):
                run = Run(fw, case, tally)
                print(case)
                run.steps()
            print("passed")
            return 0
        from tqdm import tqdm

        start = time.perf_counter()
        for number in tqdm(
            range(given.first, given.first + given.cases), mininterval=1, disable=not sys.stderr.isatty()
        ):
            if number not in given.known:
                run_case(fw, given.seed, number, tally)
            if given.stop and tally.failures:
                break
    report(tally, fw, given.seed, time.perf_counter() - start)
    if given.found:
        found = sorted(number for failures in tally.failures.values() for number, _ in failures)
        Path(given.found).write_text(json.dumps(found), encoding="utf-8")
    return len(tally.failures)


def report(tally: Tally, fw: Framework, seed: int, seconds: float) -> None:
    """Print the counts, and for each kind of failure some cases."""
    print(f"{fw.name}, seed {seed}: {tally.cases} cases, {tally.steps} steps, {tally.cases / seconds:.0f} cases/s")
    print(f"  refused as they must be: {tally.errors}; decided by rounding: {dict(tally.maybes)}")
    print(f"  given up since rounding decides what follows: {dict(tally.inconclusive)}")
    for kind, failures in sorted(tally.failures.items(), key=lambda item: -len(item[1])):
        print(f"  {len(failures)} times: {kind}")
        for number, text in failures[:3]:
            print(f"    python tests/fuzz.py --framework {fw.name} --seed {seed} --case {number}  # {text}")


if __name__ == "__main__":
    sys.exit(min(main(), 100))
