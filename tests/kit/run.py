"""Run a drawn case on a framework, in one of many ways, and check each step against the oracle."""
# ruff: noqa: EM101, TRY003, C901, PLR0911 - a mismatch names its kind; a case is run in many ways

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from types import ModuleType
from typing import Any

import numpy as np

from kit import oracle
from kit.check import FIELDS, Mismatch, check_leaves, check_report, numpy_of, reported_of, same_tree
from kit.draw import Case, Slot, drawn_case, plans_of
from kit.frameworks import Framework
from kit.oracle import Inconclusive, Leaf, Machine, Outcome
from kit.trees import EPS, mapped, walk

LAYOUTS = {
    "NumPy": ("C",) * 4 + ("F", "backwards", "strided", "fixed", "repeated", "scalar"),
    "PyTorch": ("C",) * 4 + ("F", "strided", "repeated"),
}
WAYS = (
    *("plain",) * 3,
    "holder",
    "familiar",
    "summed",
    "summed",
    "renamed",
    "moved",
    *("parts",) * 3,
)
PATIENCE = 30
"""Seconds that a process waits for the others."""


def machine_of(fw: Framework) -> Machine:
    """Return the properties of a framework that the oracle needs."""
    # Their kernels may flush subnormal numbers to 0.
    flush = fw.family in {"TensorFlow", "JAX"}
    return Machine(
        flush, fw.default_float, 0 if fw.family == "PyTorch" else -1, exact=fw.family != "MLX"
    )


def case_of(uc: ModuleType, fw: Framework, seed: int, number: int) -> Case:
    """Return a case, a function of seed and number."""
    rng = np.random.default_rng([seed, number])
    few = fw.family == "JAX"
    ways = WAYS + (("in place", "in place") if fw.writes else ())
    # No complex dtype of MLX is as wide as float64.
    dtypes = [one for one in fw.dtypes if fw.family != "MLX" or one != "float64"]
    dtypes = ["float32", "float32", "bfloat16"] if few and number % 10 else dtypes
    case = drawn_case(uc, rng, dtypes, LAYOUTS.get(fw.family, ("C",)), ways, few=few)
    if (
        few
        and case.way == "parts"
        and any(np.any(np.abs(one) > 1e15) for step in case.steps for one in step)
    ):
        case.way = "plain"
        # The squares of the norms of one process overflow, and those of another one do not.
    return case


def array_of(fw: Framework, values: np.ndarray, slot: Slot) -> Any:
    """Return an array of the framework with the memory layout of a slot."""
    with np.errstate(all="ignore"):
        # A copy, since a test may change it in place.
        array = fw.array(np.array(values), slot.dtype)
    numpy = isinstance(array, np.ndarray)
    match slot.layout if slot.shape or slot.layout == "scalar" else "C":
        case "scalar":
            return array if slot.shape else array[()]
        case "F":
            return (
                np.asfortranarray(array)
                if numpy
                else array.mT.contiguous().mT
                if array.ndim > 1
                else array
            )
        case "strided":
            return (np.repeat(array, 2, axis=0) if numpy else array.repeat_interleave(2, 0))[::2]
        case "backwards":
            return array[::-1].copy()[::-1]
        case "fixed":
            array.flags.writeable = False
        case "repeated" if array.shape[0]:
            return (
                np.broadcast_to(array[:1], array.shape) if numpy else array[:1].expand(array.shape)
            )
    return array


def together(
    fw: Framework, count: int, run: Callable[[int, Callable[[Any, str], Any]], Any]
) -> list[Any]:
    """Return ``run(number, all_reduce)`` of several simulated processes."""
    barrier = threading.Barrier(count, timeout=PATIENCE)
    addends: dict[int, np.ndarray] = {}

    def process(number: int) -> Any:
        def all_reduce(own: Any, op: str) -> Any:
            addends[number] = np.array(fw.numpy(own))
            barrier.wait()
            arrays = [addends[one] for one in range(count)]
            joined = np.sum(arrays, axis=0) if op == "sum" else reduce(np.maximum, arrays)
            # All processes have read before the next values are written.
            barrier.wait()
            return fw.array(joined, fw.dtype(own))

        try:
            with fw.context(), np.errstate(all="ignore"):
                clipped, state, report = run(number, all_reduce)
                for _, leaf in walk((clipped, state, *[getattr(report, name) for name in FIELDS])):
                    # A lazy array must be computed in the thread that created it.
                    fw.numpy(leaf)
                return clipped, state, report
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(process, number) for number in range(count)]
    errors = [error for one in futures if (error := one.exception())]
    for error in errors:
        # The other processes get this error if one fails.
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if errors:
        raise Mismatch("processes", f"one waited for {PATIENCE} s for another one")
    return [one.result() for one in futures]


def is_stateful(rule: Any) -> bool:
    """Return whether a rule is stateful; rules of the earlier package call it ``memory``."""
    return bool(rule.stateful if hasattr(rule, "stateful") else rule.memory)


class Run:
    """A case on a framework.

    ``rule`` is the rule of another case, to clip other gradients with the same rule.
    """

    def __init__(self, uc: ModuleType, fw: Framework, case: Case, rule: Any = None) -> None:
        self.uc, self.fw, self.case, self.wrapped = uc, fw, case, False
        if rule is None:
            self._tie()
            self._box()
        self.rule = case.rule if rule is None else rule
        self.plan, self.policies = case.plan, {plan.policy for plan in plans_of(case.plan)}
        self.state: Any = None
        self.own: Any = None
        self.clipper, self.joined = uc.Clipper(self.rule), True
        self.fw, self.other = (Framework() if case.way == "moved" else fw), fw

    @property
    def machine(self) -> Machine:
        """The properties of the framework that the oracle needs."""
        return machine_of(self.fw)

    def _tie(self) -> None:
        """Set the limit to one of the norms of the first step."""
        leaves = self._leaves(self.tree(self.case.steps[0])) if self.case.tie is not None else []
        with contextlib.suppress(Inconclusive):
            norms = oracle.norms_of(self.case.plan, leaves, self.machine)[0] if leaves else []
            sizes = np.concatenate([np.ravel(n.hi) for n in norms]) if norms else np.zeros(0)
            if sizes.size and np.isfinite(size := sizes[int(self.case.tie * sizes.size)]):
                self._limit(self.uc.limits.Constant(float(size)), float(size))

    def _box(self) -> None:
        """Turn the limit into an array."""
        kind, value = self.case.plan.limit[0], self.case.plan.limit[-1]
        if (
            self.case.boxed
            and self.case.plan.kind == "rule"
            and kind == "constant"
            and 1e-30 < value < 1e30
        ):
            value = float(np.float32(value))
            self._limit(self.uc.limits.Constant(self.fw.array(value, "float32")), value)

    def _limit(self, limit: Any, value: float) -> None:
        self.case.rule = replace(self.case.rule, limit=limit)
        self.case.plan = replace(self.case.plan, limit=("constant", value))

    def tree(self, values: list[np.ndarray | None]) -> Any:
        pairs = zip(values, self.case.slots, strict=True)
        made = [None if one is None else array_of(self.fw, one, slot) for one, slot in pairs]
        if self.case.twice and values is not self.case.params:
            first, second = self.case.twice
            made[second] = made[first]
        tree = mapped(lambda slot: made[slot.number], self.case.tree)
        return {"wrapped": tree} if self.wrapped else tree

    def _leaves(self, tree: Any) -> list[Leaf]:
        fw, machine = self.fw, self.machine
        return [
            oracle.leaf_of(path, fw.numpy(array), fw.dtype(array), machine)
            for path, array in walk(tree)
        ]

    def steps(self) -> None:
        """Take all steps, and clip other gradients by the same rule between them."""
        aside = self.case.aside and Run(
            self.uc, self.fw, replace(self.case.aside, plan=self.plan), self.rule
        )
        last = len(self.case.steps) - 1
        for number, (values, loss) in enumerate(
            zip(self.case.steps, self.case.losses, strict=True)
        ):
            if number == self.case.saved:
                self._save()
            if aside and number in {0, 2}:
                aside.step(aside.case.steps[number // 2 % len(aside.case.steps)], loss)
            self.step(values, loss)
            if aside and number == last:
                aside.step(aside.case.steps[-1], loss)

    def _save(self) -> None:
        """Save and load the state: for another clipper, renamed leaves, or another framework."""
        match self.case.way:
            case "holder" | "renamed":
                saved = json.loads(json.dumps(self.clipper.state_dict()))
                if self.case.way == "renamed":
                    saved, self.wrapped = (
                        self.uc.saved.renamed(saved, lambda name: "['wrapped']" + name),
                        True,
                    )
                    if isinstance(self.own, dict):
                        self.own = {("wrapped", *path): row for path, row in self.own.items()}
                self.clipper = self.uc.Clipper(self.rule)
                self.clipper.load_state_dict(saved)
            # The state of each process equals that of a single one.
            case "parts" if self.state is not None:
                self.state, self.joined = self.state[0], False
            case "moved" | "plain" if self.state is not None:
                full = self.tree(self.case.steps[0])
                saved = json.loads(json.dumps(self.uc.saved.to_dict(self.rule, self.state, full)))
                self.fw = self.other
                self.state = self.uc.saved.from_dict(
                    self.rule, saved, self.tree(self.case.steps[0])
                )

    def step(self, values: list[np.ndarray | None], loss: float | None) -> None:
        """Take a step, and check it."""
        fw, way = self.fw, self.case.way if self.joined else "plain"
        grads = self.tree(values)
        old = [np.array(fw.numpy(array)) for _, array in walk(grads)]
        leaves = self._leaves(grads)
        params = None
        if way == "parts" or any(
            plan.limit[0] in {"relative", "trust"} for plan in plans_of(self.plan)
        ):
            params = self.tree(self.case.params)
        inputs = oracle.Step(self.machine, {leaf.path: leaf for leaf in self._leaves(params)}, loss)
        try:
            clipped, report = (
                self._parts(grads, params, loss)
                if way == "parts"
                else self.call(grads, params, loss)
            )
        except FloatingPointError:
            outcome = self._outcome(leaves, inputs)
            if outcome.finite or "raise" not in self.policies:
                raise
            if way != "in place" or self.plan.kind != "chain":
                self._unchanged(grads, old)
            return
        except TypeError:
            if way != "in place" or not self._fixed(grads):
                raise
            self._unchanged(grads, old)
            return
        inputs.reported = reported_of(self.plan, report, fw)
        outcome = self._outcome(leaves, inputs)
        # An empty tree starts no state, and the report is empty.
        if way in {"holder", "renamed"} and not leaves:
            outcome.measured = any(part is not None for part in report)
        if self._raises(outcome):
            raise Mismatch("no error", "for gradients that are not finite")
        if way != "in place":
            self._unchanged(grads, old)
        same_tree(grads, clipped)
        new = [array for _, array in walk(clipped)]
        check_leaves(outcome.leaves, old, new, fw, self.machine)
        check_report(outcome, self.plan, report, fw)
        if fw.same_objects and way not in {"parts", "summed"}:
            self._same_objects(outcome, [array for _, array in walk(grads)], new)
        self.own = outcome.state

    def _outcome(self, leaves: list[Leaf], inputs: oracle.Step) -> Outcome:
        if self.case.way == "summed":
            return oracle.summed(self.plan, leaves, inputs)
        return oracle.clip(self.plan, leaves, self.own, inputs)

    def _same_objects(self, outcome: Outcome, grads: list[Any], new: list[Any]) -> None:
        """Require the same objects where nothing was clipped."""
        for leaf, one, other in zip(outcome.leaves, grads, new, strict=True):
            kept = (
                leaf.shape
                and np.size(leaf.same)
                and np.all(leaf.same)
                and self.fw.dtype(one) == leaf.dtype
            )
            if kept and outcome.finite and self.plan.kind == "rule" and one is not other:
                raise Mismatch("identity", f"{leaf.path} is another array of the same values")

    def _raises(self, outcome: Outcome) -> bool:
        parts = self.plan.parts if self.plan.kind == "chain" else (self.plan,)
        pairs = zip(parts, outcome.parts or [outcome], strict=True)
        return any(
            plans_of(part)[0].policy == "raise" and one.measured and not one.finite
            for part, one in pairs
        )

    def call(self, grads: Any, params: Any, loss: float | None) -> tuple[Any, Any]:
        uc, way = self.uc, self.case.way if self.joined else "plain"
        more = {} if loss is None else {"loss": loss}
        if way == "summed":
            return uc.clip_and_sum(grads, self.rule, params)
        if way in {"holder", "renamed"}:
            return self.clipper(grads, params, **more), self.clipper.report
        if way == "in place" and not self.plan.stateful:
            return grads, uc.clip_(grads, self.rule, params)
        if way == "familiar" and (clipped := self._by_function(grads)) is not None:
            return clipped, self.rule.update(grads, self.rule.init(grads), params)[2]
        if not self.plan.stateful:
            return uc.clip(grads, self.rule, params)
        self.state = self.rule.init(grads) if self.state is None else self.state
        more = {
            "in_place": way == "in place",
            **{key: self.fw.array(loss, "float32") for key in more},
        }
        clipped, self.state, report = self.rule.update(grads, self.state, params, **more)
        return grads if way == "in place" else clipped, report

    def _by_function(self, grads: Any) -> Any:
        """Clip by the convenience function that corresponds to the rule, if there is one."""
        uc, plan, p = self.uc, self.plan, self.plan.p
        if plan.kind == "value":
            return uc.clip_by_value(grads, *plan.bounds)
        if (plan.kind, plan.curve, plan.policy, plan.limit[0]) != (
            "rule",
            "hard",
            "propagate",
            "constant",
        ):
            return None
        limit = self.rule.limit.value
        match plan.scope.kind, plan.power:
            case "leaf", 0:
                return uc.clip_by_norm(grads, limit, ord=p)
            case "leaf", 1 if p == 2:
                return uc.clip_by_average_norm(grads, limit)
            case "axes", 0:
                return uc.clip_by_norm(grads, limit, axis=plan.scope.axes, ord=p)
            case "all", 0:
                global_norm = uc.global_norm(grads, ord=p) if self.case.boxed else None
                clipped, norm = uc.clip_by_global_norm(grads, limit, ord=p, norm=global_norm)
                wanted = numpy_of(uc.clip(grads, self.rule)[1].norms, self.fw)
                rtol = 4 * EPS[str(wanted.dtype)]
                np.testing.assert_allclose(
                    numpy_of(norm, self.fw), wanted, rtol=rtol, equal_nan=True
                )
                return clipped
        return None

    def _parts(self, grads: Any, params: Any, loss: float | None) -> tuple[Any, Any]:
        """Clip in simulated processes, each with shards of the gradients, and join the results."""
        count = 2 + (2 in self.case.processes)
        owner = {path: self.case.processes[slot.number] for path, slot in walk(self.case.tree)}

        def part(process: int) -> Callable[[tuple[Any, ...], Any], Any]:
            def own(path: tuple[Any, ...], leaf: Any) -> Any:
                if owner[path] == -2:
                    cuts = (
                        leaf.shape[0] * process // count,
                        leaf.shape[0] * (process + 1) // count,
                    )
                    return leaf[cuts[0] : cuts[1], ...]
                return leaf if owner[path] in {process, -1} else None

            return own

        def run(process: int, all_reduce: Any) -> Any:
            own, own_params = (replaced_by_path(tree, part(process)) for tree in (grads, params))
            state = self.rule.init(own_params) if self.state is None else self.state[process]
            return self.rule.update(
                own,
                state,
                own_params,
                all_reduce,
                shared=lambda path, leaf: owner[path] == -1,
                **more,
            )

        more = {} if loss is None else {"loss": loss}
        found = together(self.fw, count, run)
        self.state = [state for _, state, _ in found]
        if len(said := {str(self._said(report)) for _, _, report in found}) > 1:
            raise Mismatch("processes", f"one says {said.pop()}, another one {said.pop()}")
        clipped = [dict(walk(tree)) for tree, _, _ in found]

        def joined(path: tuple[Any, ...], leaf: Any) -> Any:
            own, fw = [tree[path] for tree in clipped if path in tree], self.fw
            return (
                fw.array(np.concatenate(list(map(fw.numpy, own))), fw.dtype(own[0]))
                if owner[path] == -2
                else own[0]
            )

        return replaced_by_path(grads, joined), found[0][2]

    def _said(self, report: Any) -> list[Any]:
        limits = [report.norms, report.limits, report.factors, report.clipped, report.finite]
        return [numpy_of(array, self.fw).tolist() for _, array in walk(limits)]

    def _fixed(self, grads: Any) -> bool:
        """Return whether an array that would be clipped is read-only."""
        where = self.plan.where or (lambda path, leaf: True)
        some = [array for path, array in walk(grads) if where(path, array)]
        fixed = [isinstance(a, (np.ndarray, np.generic)) and not a.flags.writeable for a in some]
        return any(fixed) or any(_repeats(array) for array in some)

    def _unchanged(self, grads: Any, old: list[np.ndarray]) -> None:
        for before, (path, array) in zip(old, walk(grads), strict=True):
            after = np.asarray(self.fw.numpy(array))
            wide = np.complex128 if after.dtype.kind == "c" else np.float64
            if not np.array_equal(before.astype(wide), after.astype(wide), equal_nan=True):
                raise Mismatch("input changed", f"{path}")


def replaced_by_path(
    tree: Any, leaf_of: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()
) -> Any:
    """Return the tree with a function applied to each path and leaf."""
    if isinstance(tree, dict):
        return {key: replaced_by_path(inner, leaf_of, (*path, key)) for key, inner in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(
            [replaced_by_path(inner, leaf_of, (*path, number)) for number, inner in enumerate(tree)]
        )
    return None if tree is None else leaf_of(path, tree)


def _repeats(array: Any) -> bool:
    strides = array.strides if isinstance(array, np.ndarray) else array.stride()
    pairs = zip(strides, array.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs) and 0 not in array.shape
