# SPDX-License-Identifier: MIT
"""Record the reports of a rule step by step, without waiting for an accelerator."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from uniclip._core.containers import flatten
from uniclip._core.measure import StepInputs
from uniclip._core.step import run_general_step
from uniclip._core.tree import open_tree
from uniclip._errors import check, real, whole_number
from uniclip._types import Number, StepOptions, Tree
from uniclip._types import Path as KeyPath
from uniclip._warnings import warn
from uniclip.backends import compiling, library_of
from uniclip.backends.base import stack_arrays
from uniclip.compose import AnyRule, as_rule
from uniclip.insight.record import PENDING_RECORDERS, RESERVED_KEYS, SCALAR_PREFIX, File, Row
from uniclip.insight.spikes import WINDOW, spike_thresholds
from uniclip.limits import NoState
from uniclip.norms import L1, L2, Linf, Norm
from uniclip.report import (
    NORM,
    Report,
    backend_in,
    has_values,
    keep_arrays,
    nan_where_unlimited,
    read_arrays,
)
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import each_leaf

if TYPE_CHECKING:
    import weakref


class _UnwrittenStep(NamedTuple):
    """A recorded step whose values are not yet read."""

    number: int
    names: list[str] | None
    """The names of the leaves, if their norms are recorded."""
    report: Report | dict[str, Any]
    norms_of_leaves: Iterable[Any] | None
    numbers: dict[str, Any]
    """The loss and the user's own numbers."""


class Recorder:
    """Record what clipping does: a row for each step, in a file of JSON Lines or for any function.

    The small arrays of each report stay on their device. The recorder reads the arrays of many
    steps together, so that no step waits for an accelerator. A run that is killed loses the steps
    that were not yet read. In distributed training, the process with rank 0 writes.

    Parameters
    ----------
    to : str, path or callable
        A JSON Lines file, for `uniclip.insight.read`, pandas, Polars, DuckDB and jq. If it exists,
        a run resumed from a checkpoint continues it, and drops the rows from its first new step on.
        A new run renames an old file: ``run.jsonl`` to ``run.jsonl.old``, or ``.old2`` and so on.
        Or a function of one row, such as ``wandb.log``: a dict of ``"step"``, the scalars of
        `uniclip.Report.scalars` as floats, ``"loss"`` and the other numbers. It is called up to
        ``every`` steps late.
    every : int, default 100
        The number of steps between writes. The recorder also writes at `flush` and `close`, at the
        end of the ``with`` block or the program, even after an error, and in the integrations at
        each checkpoint.
    leaves : bool or "all", default False
        Whether to record the norm of each leaf: with ``True`` at the first step, at every
        ``every``-th step and at spikes, with ``"all"`` at each step.
    rule : Rule, optional
        The rule of the reports, for the header of the file; the integrations set it.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``every`` is below 1.
    FileNotFoundError
        If ``to`` is a folder, or its folder does not exist.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from uniclip import insight
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
    >>> rule = uc.by_global_norm(1.0)
    >>> with insight.Recorder(path, rule=rule) as rec:
    ...     for step in range(3):
    ...         _, report = uc.clip([np.asarray([3.0, 4.0 * step])], rule)
    ...         rec(report, loss=1 / (1 + step))
    >>> insight.read(path).norms.round(3)
    array([3.   , 5.   , 8.544])

    >>> with insight.Recorder(lambda row: print(row["step"], row["clip/factor"])) as rec:
    ...     rec(uc.clip([np.asarray([3.0, 4.0])], rule)[1])
    1 0.2
    """

    def __init__(
        self,
        to: str | Path | Callable[[dict[str, Any]], Any],
        every: int = 100,
        leaves: bool | Literal["all"] = False,  # noqa: FBT001, FBT002
        *,
        rule: AnyRule | None = None,
    ) -> None:
        is_path = isinstance(to, (str, os.PathLike))
        expected = (
            "the path of a file, such as 'run.jsonl', or a function of a row, such as wandb.log"
        )
        check("to", to, is_path or callable(to), expected)
        check("leaves", leaves, isinstance(leaves, bool) or leaves == "all", 'True, False or "all"')

        self.path = None if callable(to) else Path(to).absolute()
        self.every = int(whole_number("every", every, 1))
        self.leaves = leaves
        self.rule: BaseRule | None = None if rule is None else as_rule(rule)
        """The rule, if it is known."""
        self.step: int | None = None
        """The last recorded step, ``None`` before the first."""
        self.loss: Number | None = None
        """The loss of the next step, instead of the one passed with it; ``None`` after the step."""
        self.holder: weakref.ref[object] | None = None
        """A weak reference to the handle that uses this recorder; ``None`` in a custom loop."""

        self._target = to
        self._file = None if self.path is None else File(self.path)
        self._names: list[str] | None = None
        """The names of the leaves of an optimizer, ``None`` if their paths are their names."""
        self._unwritten: list[_UnwrittenStep] = []
        self._recent_norms: list[float] = []
        self._writes: bool | None = None
        """Whether this process writes; ``None`` until it is known."""
        self._closed = False
        self._process = os.getpid()
        # Reentrant, because its holders call `flush`, which takes it, too.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Recorder], tuple[Any, ...], dict[str, Any]]:
        """Return what makes a copy, without the unwritten steps, which would be written twice."""
        state = {"rule": self.rule, "step": self.step, "_names": self._names}
        return Recorder, (self._target, self.every, self.leaves), state

    def __repr__(self) -> str:
        """Return the target, and the last recorded step."""
        target = self._target if self.path is None else str(self.path)
        closed = ", closed" if self._closed else ""
        return f"<Recorder: {target!r}, step {self.step}{closed}>"

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing has no Self before 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining steps."""
        self.close()

    def describe(self, rule: BaseRule, names: list[str] | None = None) -> None:
        """Set the rule, and the names of the leaves if their paths are not their names."""
        # Steps of another rule belong under its own header.
        if self.rule is not None and repr(rule) != repr(self.rule):
            self.flush()
        self.rule = rule
        self._names = names

    def __call__(
        self,
        report: Report | dict[str, Any],
        step: int | None = None,
        loss: Number | None = None,
        leaves: Mapping[str, Any] | None = None,
        **extra: Number,
    ) -> None:
        """Record one step, or the n steps of a scan.

        Parameters
        ----------
        report : Report or dict of str to 0-d array
            The report of `uniclip.clip` or `uniclip.Rule.update`, possibly returned from compiled
            code, or its scalars, which optax and Keras keep. Scalars that a scan has stacked,
            arrays of shape (n,), belong to n steps; ``loss``, ``**extra`` and the norms in
            ``leaves`` then have shape (n,), too.
        step : int, optional
            The number of the (first) step; by default the one after the last recorded step.
        loss : float or 0-d array, optional
            The loss of the step.
        leaves : dict of str to 0-d array, optional
            The norms of the leaves before clipping, by name: `uniclip.insight.leaf_norms`.
        **extra : float or 0-d array
            Other numbers to record.

        Raises
        ------
        TypeError
            In compiled code; if an argument has the wrong type or belongs to many steps, a name in
            ``extra`` is one of the recorder's keys, or norms of leaves are missing.
        ValueError
            If ``step`` is not above the last recorded step, or the recorder is closed.
        """
        _check_report(report)
        self._check_leaves(leaves)
        if isinstance(report, dict):
            count = _count_steps(report)
            if count != 1:
                self._record_scan(count, report, step, leaves, {"loss": loss, **extra})
                return
        _check_one_step(report)

        _check_names(extra)
        # The loss that a trainer has set in advance is that of all accumulated batches.
        if self.loss is not None:
            loss = self.loss
        numbers = {}
        for name, number in {"loss": loss, **extra}.items():
            if number is not None:
                numbers[name] = _check_number(name, number)
        names = None if leaves is None else list(leaves)
        norms = None if leaves is None else _stack_norms(leaves)

        # All arguments are valid by now: a call with a mistake takes no number.
        with self._lock:
            step_number = self._next_number(step)
            if self._is_writer(report):
                # Reading the values now would wait for the device at each step.
                values = keep_arrays((report, norms, numbers))
                self._unwritten.append(_UnwrittenStep(step_number, names, *values))
                PENDING_RECORDERS.add(self)
            self.step = step_number
            self.loss = None
            if len(self._unwritten) >= self.every:
                self._flush_in_training()

    def _record_scan(
        self,
        count: int,
        report: dict[str, Any],
        step: int | None,
        leaves: Mapping[str, Any] | None,
        numbers: Mapping[str, Any],
    ) -> None:
        """Record the steps of a scan, whose values are read together."""
        arrays = {name: array for name, array in numbers.items() if array is not None}
        for name, array in [*arrays.items(), *(leaves or {}).items()]:
            shape = tuple(getattr(array, "shape", ()))
            check(name, array, shape[:1] == (count,), f"an array for all {count} steps")

        trees = read_arrays((report, leaves and dict(leaves), arrays))
        for index in range(count):
            scalars_of_step, leaves_of_step, numbers_of_step = [
                tree and {name: array[index, ...] for name, array in tree.items()} for tree in trees
            ]
            number = None if step is None else step + index
            self(scalars_of_step, number, leaves=leaves_of_step, **numbers_of_step)

    def norms_of(self, grads: Tree) -> dict[str, Any] | None:
        """Return the norms of the leaves before clipping, ``None`` if they are not recorded."""
        # A step asks before it changes anything, so a closed recorder raises here.
        self._raise_if_closed()
        if not self.leaves:
            return None
        norms = leaf_norms(grads)
        return dict(zip(self._names or norms, norms.values(), strict=True))

    def _check_leaves(self, leaves: object) -> None:
        """Raise if norms of leaves are missing, are not recorded, or are no mapping."""
        if leaves is None:
            if self.leaves:
                msg = (
                    f"Recorder(..., leaves={self.leaves!r}) needs the norms of the leaves at each "
                    "step; pass leaves=insight.leaf_norms(grads)"
                )
                raise TypeError(msg)
            return
        if not self.leaves:
            msg = (
                "the recorder got leaves=, but doesn't record leaves; create it with "
                "Recorder(..., leaves=True)"
            )
            raise TypeError(msg)

        expected = "norms by name, as of insight.leaf_norms(grads)"
        check("leaves", leaves, isinstance(leaves, Mapping), expected)

    def _raise_if_closed(self) -> None:
        """Raise if the recorder is closed."""
        if self._closed:
            msg = f"{self!r} is closed; create a new recorder"
            raise ValueError(msg)

    def _next_number(self, step: int | None) -> int:
        """Return the number of a step; raise if it cannot be recorded."""
        self._raise_if_closed()
        if step is None:
            return 1 if self.step is None else self.step + 1

        number = int(whole_number("step", step, 0))
        check("step", step, number < 2**63, "a number that int64 holds")
        if self.step is not None and number <= self.step:
            msg = f"step must be above the last recorded step, {self.step}, got {number}"
            raise ValueError(msg)
        return number

    def _is_writer(self, report: Report | dict[str, Any]) -> bool:
        """Return whether this process writes."""
        if self._writes is None:
            backend = backend_in(report)
            # A report without arrays does not show the framework, and so not the rank.
            if backend is None:
                return True
            self._writes = backend.rank() == 0
        return self._writes

    def resume(self, step: int) -> None:
        """Continue after a step, as in a run resumed from a checkpoint.

        The file drops later steps.

        Parameters
        ----------
        step : int
            The last step before the next recorded one.
        """
        with self._lock:
            step = int(whole_number("step", step, 0))
            self.flush()
            self.step = step
            # A new object reads the file again, and drops the later steps.
            self._file = None if self.path is None else File(self.path)

    def flush(self) -> None:
        """Read the values of unwritten steps, and write them.

        Raises
        ------
        OSError
            If the file cannot be written. During a step this is a warning, and recording stops.
        """
        with self._lock:
            # The list is emptied first, so that no later call writes the same steps twice.
            steps = self._unwritten
            self._unwritten = []
            PENDING_RECORDERS.discard(self)
            # The steps in a forked child are those of its parent, which writes them.
            if not steps or self._process != os.getpid():
                return

            values = read_arrays([step[2:] for step in steps])
            rows = []
            for step, arrays in zip(steps, values, strict=True):
                rows.append(self._to_row(_UnwrittenStep(*step[:2], *arrays)))
            if self.leaves is True:
                self._drop_leaves(rows)

            if self._file is not None:
                self._file.write(rows, self.rule)
            elif callable(self._target):
                for row in rows:
                    self._target(nan_where_unlimited(row))

    def _to_row(self, step: _UnwrittenStep) -> Row:
        """Return the row of a step whose values are NumPy arrays."""
        report = step.report
        scalars = report if isinstance(report, dict) else report.scalars()
        row: Row = {"step": step.number}
        for name, scalar in scalars.items():
            row[name] = _to_float(scalar)
        if step.norms_of_leaves is not None:
            norms = list(map(_to_float, step.norms_of_leaves))
            row["leaves"] = dict(zip(step.names or (), norms, strict=True))
        for name, number in step.numbers.items():
            row[name] = _to_float(number)

        # A norm can be finite while a gradient is not, under the policy "zero".
        finite = math.isfinite(row.get(NORM, 0.0))
        if NORM in row and not getattr(report, "finite", True):
            finite = False
        return row if finite else row | {"finite": False}

    def _flush_in_training(self) -> None:
        """Write the unwritten steps; an error of the file must not stop a training run."""
        try:
            self.flush()
        except OSError as error:
            if self._file is None:
                raise
            self._writes = False
            warn(f"the recorder stopped: {error}")

    def _drop_leaves(self, rows: list[Row]) -> None:
        """Drop the norms of leaves, except at the end of a window and at spikes."""
        earlier = len(self._recent_norms)
        new_norms = [row.get(NORM, math.nan) for row in rows]
        norms = np.asarray([*self._recent_norms, *new_norms])
        finite = np.isfinite(norms)

        _, thresholds = spike_thresholds(norms, finite)
        stands_out = (~finite | (norms > thresholds))[earlier:]
        # Later leaves are compared with those of the first step.
        if not earlier:
            stands_out[0] = True

        for row, keep in zip(rows, stands_out, strict=True):
            if not keep and row["step"] % self.every:
                del row["leaves"]
        # The first steps of the next flush are compared with these norms.
        self._recent_norms = norms[-WINDOW:].tolist()

    def close(self) -> None:
        """Write the remaining steps, and stop recording."""
        with self._lock:
            if self._closed:
                return
            self.flush()
            self._closed = True


@atexit.register
def _close_all() -> None:
    """Write the remaining steps of all recorders when the program ends."""
    # An exit stack calls all of them, even if one fails.
    with ExitStack() as stack:
        for recorder in list(PENDING_RECORDERS):
            stack.callback(recorder.close)


def _check_report(report: object) -> None:
    """Raise unless an object is a report or its scalars, outside of compiled code."""
    if compiling():
        msg = (
            "a recorder doesn't work in compiled code; return the report from the compiled "
            "function, and record it outside"
        )
        raise TypeError(msg)

    is_scalars = isinstance(report, dict) and all(
        [str(name).startswith(SCALAR_PREFIX) for name in report]
    )
    expected = "a report, which uc.clip and Rule.update return, or the scalars of one"
    check("report", report, is_scalars or isinstance(report, Report), expected)


def _check_one_step(report: Report | dict[str, Any]) -> None:
    """Raise unless a report belongs to one step."""
    if isinstance(report, dict):
        arrays = list(report.values())
    else:
        # The reports of a chain; a lazy report without values is always of one step.
        rules = getattr(report, "rules", [report])
        arrays = [getattr(part, "finite", None) for part in rules if not has_values(part)]

    is_one = all([math.prod(getattr(array, "shape", ())) == 1 for array in arrays])
    expected = (
        "of one step; in a scan return report.scalars(), arrays of shape (n,), to record n steps "
        "together (ravel those of nested scans; of a vmap over seeds select one seed)"
    )
    check("report", report, is_one, expected)


def _check_names(numbers: Mapping[str, object]) -> None:
    """Raise if a name of a user's number is one of the recorder's own keys."""
    for name in numbers:
        if name in RESERVED_KEYS or name.startswith(SCALAR_PREFIX):
            reserved = ", ".join(sorted(RESERVED_KEYS))
            check("the name of a number", name, fits=False, wanted=f"none of {reserved}")


def _count_steps(scalars: dict[str, Any]) -> int:
    """Return the number of steps of scalars, which a scan stacks into arrays of one shape."""
    shapes = {tuple(getattr(array, "shape", ())) for array in scalars.values()}
    if len(shapes) != 1:
        return 1
    [shape] = shapes
    return shape[0] if len(shape) == 1 else 1


def _check_number(name: str, number: Number) -> Number:
    """Return one real number; raise if it is anything else."""
    number = real(name, number, "one real number")
    shape = getattr(number, "shape", ())
    check(name, number, math.prod(shape) == 1, "one real number")
    return number


def _stack_norms(leaves: Mapping[str, Any]) -> Any:
    """Return norms of leaves as one array; raise if one is not a real 0-d array."""
    norms = list(leaves.values())
    if not norms:
        return np.zeros(0)
    are_single = all([getattr(norm, "shape", None) == () for norm in norms])
    check("leaves", leaves, are_single, "0-d arrays, as of insight.leaf_norms(grads)")

    # One array is copied, and read later, faster than one for each leaf. JAX stacks slowly.
    backend = library_of(norms[0])
    views = [backend.as_numpy(norm) for norm in norms]
    if all([view is not None for view in views]):
        return real("leaves", np.array(views), "norms")
    with backend.computation_context(norms[0]):
        return real("leaves", stack_arrays(backend, norms), "norms")


def _to_float(number: float | np.generic | np.ndarray[Any, Any]) -> float:
    """Return a number as a float, with the digits of its dtype."""
    python_float = float(number.item() if isinstance(number, np.ndarray) else number)
    if getattr(number, "dtype", None) != np.float32:
        return python_float
    # In float64 a float32 of 0.1 prints as 0.10000000149011612.
    return float(f"{python_float:.9g}")


_LEAVES = {norm: Rule(math.inf, scope=each_leaf, norm=norm) for norm in (L1, L2, Linf)}


def leaf_norms(grads: Any, norm: Norm = L2) -> dict[str, Any]:
    """Return the norm of each leaf by its name.

    A name is the path of the leaf, such as ``"layers/0/w"``, and ``"0"`` for a single array. If two
    paths print alike, all names begin with the number of the leaf, as in ``"3: a/b"``.

    Parameters
    ----------
    grads : array or tree of arrays, or ``None``
    norm : Norm, default L2

    Returns
    -------
    dict of str to 0-d array
        In the order of the tree; compiled JAX code sorts the names. In the framework of the
        gradients, in float32 or wider. The norm of ``None`` is 0.

    Examples
    --------
    >>> from uniclip import insight
    >>> insight.leaf_norms({"w": np.asarray([3.0, 4.0]), "b": np.asarray([1.0])})
    {'w': np.float64(5.0), 'b': np.float64(1.0)}
    """
    rule = _LEAVES.get(norm) or Rule(math.inf, scope=each_leaf, norm=norm)
    tree = open_tree(grads)
    inputs = StepInputs(rule, [tree], StepOptions(), NoState(), rule.constant)
    result = run_general_step(inputs, apply=None)
    space = result.values.plan.space
    with space.library.computation_context(tree.first):
        zero = space.to_library(np.zeros((), space.dtypes[1]))

    norms = _with_paths(result.norms())
    names = ["/".join(map(str, path)) or "0" for path, _ in norms]
    # Different paths can print as one name: the key "a/b", and "b" inside "a".
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names)]
    return {name: zero if row is None else row for name, (_, row) in zip(names, norms, strict=True)}


def _with_paths(node: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Return the leaves of a tree with their paths; `flatten` would sort the keys of a dict."""
    if isinstance(node, (dict, list, tuple)):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, child in items for leaf in _with_paths(child, (*path, key))]
    # Most nodes are leaves, and their structure takes time.
    if node is None or hasattr(node, "shape"):
        return [(path, node)]
    leaves, structure = flatten(node)
    pairs = zip(structure.paths(), leaves, strict=True)
    return [((*path, *inner), leaf) for inner, leaf in pairs]
