# SPDX-License-Identifier: MIT
"""Write a rule's reports to a file, step by step, without waiting for an accelerator."""

from __future__ import annotations

import atexit
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from uniclip._checks import check, whole
from uniclip._repr import short
from uniclip.backends import DEFAULT, Backend, backend_of, compiling
from uniclip.insight.lines import File, Kept, header_of, kept_of, refuse_other, row_of, scope_of, written
from uniclip.insight.record import OWN
from uniclip.insight.spikes import WINDOW, compared
from uniclip.report import LOGGED, Parts, Report
from uniclip.rules import AnyRule, as_rule
from uniclip.scopes import each_leaf
from uniclip.tree import Tree, flatten

_WAITING: set[Recorder] = set()
"""The recorders with steps to write, held here so that they are not garbage-collected before."""
_INSIDE = "call the recorder outside of compiled code, on the report that the code returns"
_COPIED = {"path", "every", "leaves", "step", "_rule", "_labels", "_sizes", "_own", "_scope"}


class Recorder:
    """Record what clipping does: one line of JSON for each step.

    The small arrays of each report stay on their device, and those of many steps are read together, so that no step
    waits for an accelerator. A run that is killed loses the steps that were not yet read. With several processes the
    first one writes.

    Parameters
    ----------
    path : str or path
        A JSON Lines file, for `uniclip.insight.read`, pandas, Polars, DuckDB and jq. If it exists, a run resumed from
        a checkpoint (its first step is in the file, or the next one) continues the file, and the lines from that step
        on are dropped. A new run renames the old file: ``run.jsonl`` to ``run.jsonl.old``, or ``.old2`` and so on.
    every : int, default 100
        The number of steps between writes. Lines are also written by `flush` and `close`, when the ``with`` block or
        the program ends, also by an error, and in the integrations at each checkpoint.
    leaves : bool or "all", default False
        Whether to record the norm of each leaf: with ``True`` at every ``every``-th step and at spikes, with ``"all"``
        at each step, for `uniclip.insight.replay` of rules with one norm for each leaf.
    rule : Rule, optional
        The rule of the reports, for `uniclip.insight.replay` and the page; the integrations set it. Without it, a
        single norm is taken for the Euclidean norm of all leaves.
    params : tree of arrays, optional
        The parameters, whose paths and sizes describe the leaves in the file; the integrations set them.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If ``every`` is below 1, or the file exists and is not a recorded run.
    FileNotFoundError
        If the folder does not exist.

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
    """

    def __init__(
        self,
        path: str | Path,
        every: int = 100,
        leaves: bool | Literal["all"] = False,  # noqa: FBT001, FBT002
        *,
        rule: AnyRule | None = None,
        params: Any = None,
    ) -> None:
        check("path", path, isinstance(path, (str, os.PathLike)), "the path of a file, such as 'run.jsonl'")
        check("leaves", leaves, isinstance(leaves, bool) or leaves == "all", 'True, False or "all"')
        self.path, self.every, self.leaves = Path(path).absolute(), whole("every", every, 1), leaves
        if not self.path.parent.is_dir():
            msg = f"there is no folder {str(self.path.parent)!r} to write {self.path.name!r} into"
            raise FileNotFoundError(msg)
        refuse_other(self.path)
        self.step: int | None = None
        """The last step that was recorded, ``None`` before the first."""
        self._rule = None if rule is None else as_rule(rule)
        self._labels: list[str] | None = None
        self._sizes: list[int] | None = None
        self._own: Backend | None = None
        self._scope: str | None = None
        self._begin()
        if params is not None:
            self.describe(rule, flatten(params, "params"))

    def _begin(self) -> None:
        """Begin without steps."""
        self.loss: Any = None
        """The loss of the next step, if it is not passed with the step; ``None`` after the step."""
        self.holder: Any = None
        """A weak reference to the handle that records by it, unless a loop does; there is only one."""
        self._file = File(self.path)
        self._kept: list[Kept] = []
        self._sources: list[Callable[[], None]] = []
        self._writes: bool | None = None
        self._closed = self._stopped = False
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, without steps, which would be written twice."""
        return {name: value for name, value in vars(self).items() if name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without steps."""
        vars(self).update(state)
        self._begin()

    def __repr__(self) -> str:
        """Return the path, and the last recorded step."""
        return f"<Recorder: {str(self.path)!r}, step {self.step}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing has no Self before 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write the remaining steps."""
        self.close()

    def __call__(
        self,
        report: Report | dict[str, Any],
        step: int | None = None,
        loss: Any = None,
        leaves: Any = None,
        **extra: Any,
    ) -> None:
        """Record one step.

        Parameters
        ----------
        report : Report or dict of str to 0-d array
            The report of `uniclip.clip` or `uniclip.Rule.update`, also from compiled code, but not inside of it; or
            its scalars, for integrations without reports.
        step : int, optional
            The number of the step; by default the one after the last.
        loss : float or 0-d array, optional
            The loss of the step.
        leaves : (k,) array or tree of k 0-d arrays, optional
            The norms of all leaves, as `uniclip.insight.leaf_norms` returns them. Not needed for a rule with one norm
            for each leaf, if the recorder knows the rule.
        **extra : float or 0-d array
            Other numbers to record.

        Raises
        ------
        TypeError
            If an argument has the wrong type or is traced by a compiler, or if norms of leaves are missing.
        ValueError
            If ``step`` is not above the last one, a name in ``extra`` is one of the recorder's keys, or the recorder
            is closed.
        """
        if compiling():
            raise TypeError(_INSIDE)
        fits = isinstance(report, Report) or (isinstance(report, dict) and report.keys() <= set(LOGGED))
        check("report", report, fits, "a report, which uc.clip and Rule.update return, or the scalars of one")
        rows, places = self._leaves_of(report, leaves)
        parts = _of_scalars(report) if isinstance(report, dict) else report.parts()
        self.take(parts, step, loss, rows, places, extra)

    def _leaves_of(self, report: Report | dict[str, Any], leaves: Any) -> tuple[list[Any], list[int] | None]:
        """Return the norms of leaves as arrays, and the leaves they belong to."""
        if not self.leaves:
            check("leaves", leaves, leaves is None, "left out, or recorded with Recorder(..., leaves=True)")
            return [], None
        if leaves is None and isinstance(report, Report) and getattr(self._rule, "scope", None) == each_leaf:
            leaves = report.norms
        if leaves is None:
            msg = "leaves are recorded, so give their norms: rec(report, leaves=insight.leaf_norms(grads))"
            raise TypeError(msg)
        tree = flatten(leaves, "leaves", none_is_leaf=True)
        if self._labels is None and len(tree.leaves) > 1:
            self._labels = ["/".join(map(str, path)) for path in tree.paths()]
        places = [number for number, leaf in enumerate(tree.leaves) if leaf is not None]
        some = [tree.leaves[number] for number in places]
        if len(tree.leaves) > 1 and any([getattr(leaf, "shape", ()) for leaf in some]):
            msg = "leaves must be norms, one array of them or a tree of 0-d arrays: insight.leaf_norms(grads)"
            raise ValueError(msg)
        return some, None if len(some) == len(tree.leaves) else places

    def take(  # noqa: PLR0913, PLR0917 - what a line holds
        self,
        parts: list[Parts],
        step: int | None = None,
        loss: Any = None,
        leaves: Sequence[Any] = (),
        places: Sequence[int] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Record a step of a report's parts; ``places`` are the numbers of the leaves that have a gradient."""
        taken = OWN.intersection(extra or ())
        if taken:
            msg = f"the recorder writes {min(taken)!r} by itself: give what else it is to hold another name"
            raise ValueError(msg)
        with self._lock:
            loss = self.loss if loss is None else loss
            number = self._number(step)
            if self._is_first_process(parts):
                kept = kept_of(
                    number, parts, list(leaves), places, ({} if loss is None else {"loss": loss}) | (extra or {})
                )
                kept = kept._replace(values=_to_keep(kept))
                self._count(kept)
                self._kept.append(kept)
                _WAITING.add(self)
            self.step, self.loss = number, None
            if len(self._kept) >= self.every:
                self._flush_in_training()

    def _number(self, step: int | None) -> int:
        """Return the number of a step; refuse one that cannot be recorded."""
        if self._closed:
            msg = f"the recorder of {str(self.path)!r} is closed"
            raise ValueError(msg)
        if self._process != os.getpid():
            msg = f"the recorder of {str(self.path)!r} was made in another process: make one in this one"
            raise RuntimeError(msg)
        if step is None:
            return 1 if self.step is None else self.step + 1
        number = int(whole("step", step, 0))
        if self.step is not None and number <= self.step:
            msg = f"step must be above the last one that was recorded, {self.step}, got {number}"
            raise ValueError(msg)
        return number

    def _count(self, kept: Kept) -> None:
        """Refuse norms of other leaves than at earlier steps."""
        if not kept.leaves or kept.places is not None:
            return
        first, arrays = sum(map(sum, kept.parts)), kept.leaves
        count = sum([math.prod(getattr(value, "shape", ())) for value in kept.values[first : first + arrays]])
        if self._labels is None:
            self._labels = [str(number) for number in range(count)]
        if count != len(self._labels):
            msg = f"leaves must be the norms of the same {len(self._labels)} leaves at each step, got {count}"
            raise ValueError(msg)

    def _is_first_process(self, parts: list[Parts]) -> bool:
        if self._writes is None:
            own = parts[0].own if parts else self._own
            self._writes = own is None or own.processes.rank() == 0
        return self._writes and not self._stopped

    def describe(self, rule: Any, params: Tree | None = None) -> None:
        """Set the rule, and the leaves by their paths and sizes, which the integrations know."""
        self._rule = self._rule if rule is None else rule
        if params is not None and params.leaves:
            self._own = backend_of(params.leaves[0])
            self._labels = ["/".join(map(str, path)) or "0" for path in params.paths()]
            self._sizes = [math.prod(leaf.shape) for leaf in params.leaves]

    def draws_from(self, source: Callable[[], None]) -> None:
        """Register a function to call before lines are written, which fetches steps from compiled code."""
        self._sources.append(source)
        _WAITING.add(self)

    def resume(self, step: int) -> None:
        """Continue after a step, as a run resumed from a checkpoint does; later steps are dropped from the file.

        Parameters
        ----------
        step : int
            The last step before the next recorded one.
        """
        with self._lock:
            step = int(whole("step", step, 0))
            self.flush()
            self.step, self._file = step, File(self.path)
            if self._labels is not None and step:
                self._file.begin(self._header(), step + 1)

    def flush(self) -> None:
        """Read the values that are kept, and write them.

        Raises
        ------
        OSError
            If the file cannot be written. During a step this is a warning, and recording stops.
        ValueError
            If the file is a run with other leaves.
        """
        with self._lock:
            for source in self._sources:
                source()
            if not self._sources:
                _WAITING.discard(self)
            if not self._kept or self._process != os.getpid():
                return
            kept, self._kept = _read(self._kept), []
            found = [row_of(one) for one in kept]
            if self._rule is None:
                self._scope = self._scope or scope_of(kept[0])
            header = self._header()
            self._file.begin(header, kept[0].step)
            shown = self._with_leaves([row for row, _ in found])
            lines = [
                written(row, self._whole(leaves, one.places) if leaves is not None and show else None)
                for (row, leaves), one, show in zip(found, kept, shown, strict=True)
            ]
            self._file.write(header, lines)

    def _flush_in_training(self) -> None:
        """Write the lines that are kept, without stopping a training run at an error in the file."""
        try:
            self.flush()
        except OSError as error:
            self._stopped = True
            warnings.warn(f"recording stops: {error}", UserWarning, stacklevel=4)

    def _header(self) -> dict[str, Any]:
        named = (self._labels, self._sizes) if self.leaves else (None, None)
        return header_of(self._rule, self._scope, self.every, *named)

    def _with_leaves(self, rows: list[dict[str, Any]]) -> list[bool]:
        """Return for each step whether the norms of its leaves are written."""
        if self.leaves is not True:
            return [bool(self.leaves)] * len(rows)
        before, new = self._file.norms, [math.nan if row.get("norm") is None else row["norm"] for row in rows]
        norms = np.asarray(before + new)
        finite = np.isfinite(norms)
        loud = (~finite | (norms > compared(norms, finite)[1]))[len(before) :]
        self._file.norms = (before + new)[-WINDOW:]
        return [bool(one) or row["step"] % self.every == 0 for one, row in zip(loud, rows, strict=True)]

    def _whole(self, leaves: np.ndarray[Any, Any], places: Sequence[int] | None) -> np.ndarray[Any, Any]:
        """Return norms of all leaves, NaN for those without a gradient."""
        if places is None or self._labels is None:
            return leaves
        whole = np.full(len(self._labels), np.nan, leaves.dtype)
        whole[list(places)] = leaves
        return whole

    def close(self) -> None:
        """Write the remaining lines, and stop recording."""
        with self._lock:
            if not self._closed:
                self.flush()
                self._closed = True
                _WAITING.discard(self)


def flush_to(path: Path) -> None:
    """Write the remaining lines of the recorders of a file."""
    for recorder in list(_WAITING):
        if recorder.path == path.absolute():
            recorder.flush()


@atexit.register
def _at_exit() -> None:
    """Write the remaining lines at exit."""
    for recorder in list(_WAITING):
        recorder.close()


def _of_scalars(scalars: dict[str, Any]) -> list[Parts]:
    """Return the scalars of a report as its parts."""
    if not scalars:
        return []
    norm, limit, threshold, factor, share, skipped = [scalars.get(name) for name in LOGGED]
    own = backend_of(norm) or DEFAULT
    return [Parts(own, own, [norm], [limit], [factor], None if threshold is None else [threshold], (), skipped, share)]


def _to_keep(kept: Kept) -> list[Any]:
    """Return the values of a step, detached, and copied if they may be overwritten; refuse all but numbers."""
    values, first = list(kept.values), sum(map(sum, kept.parts))
    names = ["the report"] * first + ["leaves"] * kept.leaves + kept.names
    for number in range(first, len(values)):
        values[number] = _checked(names[number], values[number], one=number >= first + kept.leaves)
    for backend, numbers in kept.by_backend().items():
        arrays = [values[number] for number in numbers]
        if backend is None:
            raise TypeError(_no_number(names[numbers[0]], arrays[0]))
        if any([backend.traced(array) for array in arrays]):
            raise TypeError(_INSIDE)
        for number, array in zip(numbers, arrays, strict=True):
            if number >= first:
                _real(backend, names[number], array)
        with backend.quiet():
            arrays = backend.to_keep(arrays)
        for number, array in zip(numbers, arrays, strict=True):
            values[number] = array
    return values


def _checked(name: str, value: Any, *, one: bool) -> Any:
    """Return a value to keep, copied if it is on the host; ``one`` number, if it must be."""
    if one and math.prod(getattr(value, "shape", ())) != 1:
        msg = f"{name} must be one number, got {short(value)}"
        raise ValueError(msg)
    if isinstance(value, (int, float)):
        return _as_float(name, value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _real(DEFAULT, name, np.array(value))
    return value


def _as_float(name: str, value: float) -> float:
    """Return a Python number as a float."""
    try:
        return float(value)
    except OverflowError as error:
        msg = f"{name} must be a number that float64 can hold, got {short(value)}"
        raise ValueError(msg) from error


def _no_number(name: str, value: Any) -> str:
    return f"{name} must be numbers or arrays of real numbers, got {short(value)}"


def _real(backend: Backend, name: str, array: Any) -> Any:
    """Return an array of real numbers or flags; refuse others."""
    try:
        real = any(backend.xp.isdtype(array.dtype, kind) for kind in ("bool", "integral", "real floating"))
    except (TypeError, ValueError):  # a dtype unknown to the array API
        real = False
    if not real:
        raise TypeError(_no_number(name, array))
    return array


def _read(steps: list[Kept]) -> list[Kept]:
    """Return the steps as NumPy arrays; all arrays of one framework are read together."""
    theirs: dict[Any, list[tuple[int, int]]] = {}
    for step, kept in enumerate(steps):
        for backend, numbers in kept.by_backend().items():
            theirs.setdefault(backend, []).extend((step, number) for number in numbers)
    values = [list(kept.values) for kept in steps]
    for backend, places in theirs.items():
        with backend.quiet():
            arrays = backend.to_host([values[step][number] for step, number in places])
        for (step, number), array in zip(places, arrays, strict=True):
            values[step][number] = array
    return [kept._replace(values=some) for kept, some in zip(steps, values, strict=True)]
