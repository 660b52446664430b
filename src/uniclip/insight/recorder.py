# SPDX-License-Identifier: MIT
"""Record a rule's reports, step by step, without waiting for an accelerator."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from uniclip._core.step import run_general_step
from uniclip._core.tree import flatten, open_tree
from uniclip._errors import check, real, summarize, whole
from uniclip._types import Step
from uniclip._warnings import warn
from uniclip.backends import compiling
from uniclip.backends.base import stack_arrays
from uniclip.compose import AnyRule, as_rule
from uniclip.insight.record import LOGGED, OWN, WAITING, File
from uniclip.insight.spikes import WINDOW, compared
from uniclip.limits import NoState
from uniclip.norms import L1, L2, Linf, Norm
from uniclip.report import NORM, Report, backend_in, has_values, keep_arrays, read_arrays
from uniclip.rule import Rule
from uniclip.scopes import each_leaf

_INSIDE = "call the recorder outside of compiled code, on the report that the code returns"


class Recorder:
    """Record what clipping does: a row for each step, in a file of JSON Lines or for any function.

    The small arrays of each report stay on their device, and those of many steps are read together,
    so that no step waits for an accelerator. A run that is killed loses the steps that were not yet
    read. With several processes the first one writes.

    Parameters
    ----------
    to : str, path or callable
        A JSON Lines file, for `uniclip.insight.read`, pandas, Polars, DuckDB and jq. If it exists,
        a run resumed from a checkpoint continues it: what it holds from the first new step on is
        dropped. A new run renames an old file: ``run.jsonl`` to ``run.jsonl.old``, or ``.old2`` and
        so on. Or a function of one row, such as ``wandb.log``: a dict of ``"step"``, the scalars of
        `uniclip.Report.scalars` as floats, ``"loss"`` and the other numbers. It is called up to
        ``every`` steps late.
    every : int, default 100
        The number of steps between writes. Rows are also written by `flush` and `close`, when the
        ``with`` block or the program ends, also by an error, and in the integrations at each
        checkpoint.
    leaves : bool or "all", default False
        Whether to record the norm of each leaf: with ``True`` at the first step, at every
        ``every``-th and at spikes, with ``"all"`` at each step.
    rule : Rule, optional
        The rule of the reports, which the file names; the integrations set it.
    params : tree of arrays, optional
        The parameters, whose paths name the leaves; the integrations set it. Without it leaves have
        numbers.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``every`` is below 1.
    FileNotFoundError
        If ``to`` is a folder, or lies in one that does not exist.

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
        params: Any = None,
    ) -> None:
        fits = isinstance(to, (str, os.PathLike)) or callable(to)
        check(
            "to",
            to,
            fits,
            "the path of a file, such as 'run.jsonl', or a function of a row, such as wandb.log",
        )
        check("leaves", leaves, isinstance(leaves, bool) or leaves == "all", 'True, False or "all"')
        self.path = None if callable(to) else Path(to).absolute()
        self.every, self.leaves = int(whole("every", every, 1)), leaves
        self.rule = None if rule is None else as_rule(rule)
        """The rule, as far as it is known."""
        self.step: int | None = None
        """The last step that was recorded, ``None`` before the first."""
        self._to: Any = to
        self.loss: Any = None
        """The loss of the next step, in the place of one that is passed with it;
        ``None`` after the step.
        """
        self.holder: Any = None
        """A weak reference to the handle that records by it, unless a loop does;
        there is only one.
        """
        self._labels: list[str] | None = None
        self._file = None if self.path is None else File(self.path)
        self._kept: list[tuple[int, list[str] | None, Any]] = []
        self._norms: list[float] = []
        self._writes: bool | None = None
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        if params is not None:
            self.describe(params=params)

    def __reduce__(self) -> Any:
        """Return what makes a copy, without the steps that wait, which would be written twice."""
        names = ("rule", "step", "_labels")
        return (
            Recorder,
            (self._to, self.every, self.leaves),
            {name: getattr(self, name) for name in names},
        )

    def __repr__(self) -> str:
        """Return where it writes, and the last recorded step."""
        to = self._to if self.path is None else str(self.path)
        return f"<Recorder: {to!r}, step {self.step}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing has no Self before 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining steps."""
        self.close()

    def describe(self, rule: Any = None, params: Any = None) -> None:
        """Set the rule, and the names of the leaves, which the integrations know."""
        self.rule = rule or self.rule
        if params is not None:
            paths = flatten(params, "params")[1].paths()
            names = ["/".join(map(str, path)) or "0" for path in paths]
            alike = len(set(names)) < len(names)
            self._labels = [
                f"{number}: {name}" if alike else name for number, name in enumerate(names)
            ]

    def __call__(
        self,
        report: Report | dict[str, Any],
        step: int | None = None,
        loss: Any = None,
        leaves: Any = None,
        **extra: Any,
    ) -> None:
        """Record one step, or the n steps of a scan.

        Parameters
        ----------
        report : Report or dict of str to 0-d array
            The report of `uniclip.clip` or `uniclip.Rule.update`, also from compiled code, but not
            inside of it; or its scalars, which optax and Keras keep. Scalars that a scan has
            stacked, arrays of shape (n,), are those of n steps; ``loss``, ``leaves`` and
            ``**extra`` then have a first axis of n, too.
        step : int, optional
            The number of the (first) step; by default the one after the last.
        loss : float or 0-d array, optional
            The loss of the step.
        leaves : (k,) array, optional
            The norms of all k leaves before clipping: `uniclip.insight.leaf_norms`.
        **extra : float or 0-d array
            Other numbers to record.

        Raises
        ------
        TypeError
            If an argument has the wrong type, is traced by a compiler or of many steps, if a name
            in ``extra`` is one of the recorder's keys, or if norms of leaves are missing.
        ValueError
            If ``step`` is not above the last one, there are norms of other leaves than before, or
            the recorder is closed.
        """
        if compiling():
            raise TypeError(_INSIDE)
        scalars = isinstance(report, dict) and all(
            [str(name).startswith(LOGGED) for name in report]
        )
        fits = scalars or isinstance(report, Report)
        check(
            "report",
            report,
            fits,
            "a report, which uc.clip and Rule.update return, or the scalars of one",
        )
        if isinstance(report, dict) and (count := _count_steps(report)) != 1:
            self._record_each(count, report, step, {"loss": loss, "leaves": leaves} | extra)
            return
        each = getattr(report, "rules", [report])
        flags = [getattr(one, "finite", None) for one in each if not has_values(one)]
        single = [*report.values()] if isinstance(report, dict) else flags
        one = all([math.prod(getattr(value, "shape", ())) == 1 for value in single])
        wanted = (
            "of one step; of a scan return report.scalars(), arrays of shape (n,), which can be "
            "recorded together: ravel those of nested scans, and of a vmap over seeds give one "
            "seed"
        )
        check("report", report, one, wanted)
        for name in extra:
            own = name in OWN or name.startswith(LOGGED)
            check("the name of a number", name, not own, f"none of {', '.join(sorted(OWN))}")
        loss = loss if self.loss is None else self.loss
        numbers = {
            name: _one(name, value)
            for name, value in ({"loss": loss} | extra).items()
            if value is not None
        }
        if bool(self.leaves) != (leaves is not None):
            msg = (
                "Recorder(..., leaves=True) takes norms of leaves, and only it: "
                "leaves=insight.leaf_norms(grads)"
            )
            raise TypeError(msg)
        if leaves is not None:
            self._check_leaves(leaves)
        with self._lock:
            number = self._number(step)
            if self._is_first_process(report):
                self._kept.append((number, self._labels, keep_arrays((report, leaves, numbers))))
                WAITING.add(self)
            self.step, self.loss = number, None
            if len(self._kept) >= self.every:
                self._flush_in_training()

    def _record_each(
        self, count: int, report: dict[str, Any], step: int | None, others: dict[str, Any]
    ) -> None:
        """Record many steps, whose values are read together."""
        others = {name: value for name, value in others.items() if value is not None}
        for name, value in others.items():
            check(
                name,
                value,
                tuple(getattr(value, "shape", ()))[:1] == (count,),
                f"an array for all {count} steps",
            )
        report, others = read_arrays((report, others))
        for number in range(count):
            row, beside = (
                {name: values[number, ...] for name, values in part.items()}
                for part in (report, others)
            )
            self(row, None if step is None else step + number, **beside)

    def norms_of(self, grads: Any) -> Any:
        """Return the norms of the leaves of a step, before they are clipped.

        ``None`` if they are not recorded.
        """
        self._raise_if_closed()  # before anything is changed
        return leaf_norms(grads) if self.leaves else None

    def _check_leaves(self, leaves: Any) -> None:
        """Refuse norms of other leaves than before."""
        shape = tuple(getattr(leaves, "shape", ()))
        if self._labels is None and len(shape) == 1:
            self._labels = list(map(str, range(shape[0])))
        if self._labels is None or shape != (len(self._labels),):
            wanted = "all" if self._labels is None else f"the same {len(self._labels)}"
            msg = (
                f"leaves must be the norms of {wanted} leaves, insight.leaf_norms(grads), got "
                f"{summarize(leaves)}"
            )
            raise ValueError(msg)
        real("leaves", leaves, "norms")

    def _raise_if_closed(self) -> None:
        if self._closed:
            msg = f"{self!r} is closed"
            raise ValueError(msg)

    def _number(self, step: int | None) -> int:
        """Return the number of a step; refuse one that cannot be recorded."""
        self._raise_if_closed()
        if step is None:
            return 1 if self.step is None else self.step + 1
        number = int(whole("step", step, 0))
        check("step", step, number < 2**63, "a number that int64 holds")
        if self.step is not None and number <= self.step:
            msg = f"step must be above the last one that was recorded, {self.step}, got {number}"
            raise ValueError(msg)
        return number

    def _is_first_process(self, report: Any) -> bool:
        """Whether this process writes; once it is known, so it stays."""
        if self._writes is None:
            library = backend_in(report)
            if library is None:
                return True
            self._writes = library.rank() == 0
        return self._writes

    def resume(self, step: int) -> None:
        """Continue after a step, as a run resumed from a checkpoint does.

        Later steps are dropped from the file.

        Parameters
        ----------
        step : int
            The last step before the next recorded one.
        """
        with self._lock:
            step = int(whole("step", step, 0))
            self.flush()
            self.step, self._file = step, None if self.path is None else File(self.path)

    def flush(self) -> None:
        """Read the values that are kept, and write them.

        Raises
        ------
        OSError
            If the file cannot be written. During a step this is a warning, and recording stops.
        """
        with self._lock:
            kept, self._kept = self._kept, []
            WAITING.discard(self)
            if not kept or self._process != os.getpid():  # what was forked has no steps of its own
                return
            numbers, labels, trees = zip(*kept, strict=True)
            rows = list(map(self._made, numbers, labels, read_arrays(list(trees))))
            if self.leaves is True:
                self._drop_leaves(rows)
            if self._file is not None:
                self._file.write(rows, self.rule)
            else:
                for row in rows:
                    self._to(row)

    def _made(
        self, step: int, labels: list[str] | None, kept: tuple[Any, Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the row of a step: its report, the norms of leaves,
        and other numbers, in NumPy.
        """
        report, leaves, numbers = kept
        scalars = report if isinstance(report, dict) else report.scalars()
        row: dict[str, Any] = {
            "step": step,
            **{name: _plain(value) for name, value in scalars.items()},
        }
        if self.leaves:
            row["leaves"] = dict(zip(labels or (), map(_plain, leaves), strict=True))
        row |= {name: _plain(value) for name, value in numbers.items()}
        sound = math.isfinite(row.get(NORM, 0.0)) and bool(
            getattr(report, "finite", True) or NORM not in row
        )
        return row if sound else row | {"finite": False}

    def _flush_in_training(self) -> None:
        """Write the rows that are kept, without stopping a training run at an error in the file."""
        try:
            self.flush()
        except OSError as error:
            if self._file is None:
                raise
            self._writes = False
            warn(f"recording stops: {error}")

    def _drop_leaves(self, rows: list[dict[str, Any]]) -> None:
        """Leave out the norms of leaves but at the end of a window and at spikes."""
        norms = np.asarray([*self._norms, *[row.get(NORM, math.nan) for row in rows]])
        finite = np.isfinite(norms)
        loud = (~finite | (norms > compared(norms, finite)[1]))[len(self._norms) :]
        loud[: not self._norms] = True  # the first, with which others are compared
        for row, is_loud in zip(rows, loud, strict=True):
            if not is_loud and row["step"] % self.every:
                del row["leaves"]
        self._norms = norms[-WINDOW:].tolist()

    def close(self) -> None:
        """Write the remaining rows, and stop recording."""
        with self._lock:
            if not self._closed:
                self.flush()
                self._closed = True


@atexit.register
def _at_exit() -> None:
    """Write the remaining rows at exit."""
    with ExitStack() as closing:  # all, also after one that fails
        for recorder in list(WAITING):
            closing.callback(recorder.close)


def _count_steps(scalars: dict[str, Any]) -> int:
    """Return of how many steps scalars are: a scan stacks them to arrays of one shape."""
    shapes = {tuple(getattr(value, "shape", ())) for value in scalars.values()}
    shape = shapes.pop() if len(shapes) == 1 else ()
    return shape[0] if len(shape) == 1 else 1


def _one(name: str, value: Any) -> Any:
    """Return one real number, or refuse what is none."""
    value = real(name, value, "one real number")
    check(name, value, math.prod(getattr(value, "shape", ())) == 1, "one real number")
    return value


def _plain(value: Any) -> float:
    """Return a number as a float, with the digits of its dtype."""
    number = float(value.item() if isinstance(value, np.ndarray) else value)
    return float(f"{number:.9g}") if getattr(value, "dtype", None) == np.float32 else number


_LEAVES = {norm: Rule(math.inf, scope=each_leaf, norm=norm) for norm in (L1, L2, Linf)}


def leaf_norms(grads: Any, norm: Norm = L2) -> Any:
    """Return the norms of all leaves as one array, ``(k,)``, in the order of the tree.

    The norm of ``None`` is 0.

    Parameters
    ----------
    grads : array or tree of k arrays, or ``None``
    norm : Norm, default L2

    Returns
    -------
    (k,) array
        In the framework of the gradients, in float32 or wider.

    Examples
    --------
    >>> from uniclip import insight
    >>> insight.leaf_norms({"w": np.asarray([3.0, 4.0]), "b": np.asarray([1.0])})
    array([1., 5.])
    """
    rule = _LEAVES.get(norm) or Rule(math.inf, scope=each_leaf, norm=norm)
    tree = open_tree(grads)
    result = run_general_step(rule, tree, NoState(), Step(), rule.constant, apply=None)
    plan = result.values.plan
    rows = flatten(result.norms()).leaves
    if not rows:
        return plan.math.to_library(np.zeros(0))
    zero = plan.math.to_library(np.zeros((), plan.math.dtypes[1]))
    with plan.math.library.computation_context(tree.first):
        return stack_arrays(plan.math.library, [zero if row is None else row for row in rows])
