# SPDX-License-Identifier: MIT
"""A rule and its memory in one object, for training loops that are not compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optree

from uniclip._checks import check
from uniclip._repr import short
from uniclip.absent import filled
from uniclip.backends import backend_of
from uniclip.decide import Report
from uniclip.measure import AllReduce
from uniclip.rules import as_rule
from uniclip.scopes import all_leaves
from uniclip.tree import Tree, flatten, place


class Clipper:
    """Clip step after step by one rule, and remember for it.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        With memory or without.

    Attributes
    ----------
    rule : Rule
    report : Report or None
        What the last step saw and did; ``None`` before the first one.
    state : tree of arrays or None
        What the rule remembers; ``None`` before the first step. It may be set, to one that was saved.

    Raises
    ------
    TypeError
        If ``rule`` is neither a rule nor a function of one gradient array.

    Notes
    -----
    A clipper can be copied, pickled, and read by other threads while one clips. In compiled code,
    which runs once and not at every step, use ``rule.init`` and ``rule.update``.

    Examples
    --------
    >>> clipper = uc.Clipper(uc.autoclip(percentile=50))
    >>> for norm in [1.0, 3.0, 50.0]:
    ...     print(clipper({"w": np.asarray([norm])}))
    {'w': array([1.])}
    {'w': array([2.])}
    {'w': array([3.])}
    >>> float(clipper.report.norms)
    50.0
    """

    def __init__(self, rule: Any) -> None:
        self.rule = as_rule(rule)
        self._paths: list[str] | None = None
        # What was loaded, the state and the report in one attribute: other threads see those of one step.
        self._last: tuple[dict[str, Any], Any, Report | None] = ({}, None, None)

    def __repr__(self) -> str:
        """Return source text."""
        return f"Clipper({self.rule!r})"

    @property
    def report(self) -> Report | None:
        """What the last step saw and did."""
        return self._last[2]

    @property
    def state(self) -> Any:
        """What the rule remembers."""
        return self._last[1]

    @state.setter
    def state(self, state: Any) -> None:
        self._last = ({}, state, None)

    def __call__(self, grads: Any, params: Any = None, all_reduce: AllReduce | None = None, *, loss: Any = None) -> Any:
        """Clip the gradients of a step.

        Parameters
        ----------
        grads, params, all_reduce
            As in `uniclip.clip`.
        loss
            As in `Rule.update`.

        Returns
        -------
        clipped : tree

        Raises
        ------
        TypeError
            As `uniclip.clip`; and in code that is being compiled, if the rule remembers.
        ValueError, FloatingPointError
            As `uniclip.clip`; and if a state that was loaded is of another rule, or of other gradients.
        """
        return self._step(grads, params, all_reduce, loss, in_place=False)[0]

    def clip_(self, grads: Any, params: Any = None, all_reduce: AllReduce | None = None, *, loss: Any = None) -> Report:
        """Clip the gradients of a step in place, as `uniclip.clip_` does, and return the report."""
        return self._step(grads, params, all_reduce, loss, in_place=True)[1]

    def init(self, grads: Any) -> None:
        """Make the state now, not at the first step: from gradients, or from parameters of the same shapes."""
        self._last = ({}, self._first(grads), None)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers as plain numbers and lists, which any file format and framework can hold.

        Returns
        -------
        dict
            It can be passed to ``json.dumps``, too. Before the first step it is empty.
        """
        saved, state, _ = self._last
        if state is None:
            return dict(saved)
        paths, arrays, _ = optree.tree_flatten_with_accessor(state)
        return {_name(path): _plain(array) for path, array in zip(paths, arrays, strict=True)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, in this or in another framework.

        Parameters
        ----------
        saved : dict
            It is read at the next step, which knows the framework, the dtypes and the shapes.

        Raises
        ------
        TypeError
            If it is no dict.
        """
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        self._last = (dict(saved), None, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: nothing of a framework."""
        return {"rule": self.rule, "saved": self.state_dict()}

    def __setstate__(self, held: dict[str, Any]) -> None:
        """Go on from a copy or a pickle."""
        self.rule, self._paths = held["rule"], None
        self.load_state_dict(held["saved"])

    def _first(self, grads: Any) -> Any:
        new, saved = self.rule.init(grads), self._last[0]
        if not saved:
            return new
        paths, arrays, spec = optree.tree_flatten_with_accessor(new)
        names = [_name(path) for path in paths]
        if set(names) != set(saved):
            msg = (
                f"the saved state, of {sorted(saved)}, is not one of {short(self.rule)} on these gradients, which has "
                f"{sorted(names)}: load it into a Clipper of the rule that it was saved from"
            )
            raise ValueError(msg)
        loaded = [_loaded(saved[name], array, name) for name, array in zip(names, arrays, strict=True)]
        return optree.tree_unflatten(spec, loaded)

    def _step(
        self, grads: Any, params: Any, all_reduce: AllReduce | None, loss: Any, *, in_place: bool
    ) -> tuple[Any, Report]:
        state = self.state
        if state is None or self.rule.by_leaf:
            tree = flatten(grads)
            grads = tree.rebuild(tree.leaves)  # an iterator can be read once
            if not tree.leaves and self.rule.memory and all_reduce is None:
                return grads, Report()  # there is nothing to learn, and no framework to learn in
            joined = all_reduce is not None and params is not None  # then the norms are those of all parameters
            if not joined:
                self._refuse_others(tree)
            if state is None and not joined and not tree.leaves and self.rule.memory:
                filled(all_leaves, grads, None, None)  # an error
            state = self._first(params if joined else grads) if state is None else state
        self._refuse_traced(state)  # a graph cannot even use what was learned outside of it
        clipped, state, report = self.rule.update(grads, state, params, all_reduce, in_place=in_place, loss=loss)
        self._refuse_traced(state)
        self._last = ({}, state, report)
        return clipped, report

    def _refuse_others(self, tree: Tree) -> None:
        """Refuse gradients of other leaves than those of the first step, if the state knows them by their order."""
        if not self.rule.by_leaf:
            return
        paths = [place("grads", path) for path in tree.paths()]
        others = sorted(set(paths) ^ set(self._paths or paths))
        if others:
            msg = (
                f"{short(self.rule)} remembers each leaf by itself, and {', '.join(others[:5])} had a gradient at one "
                "step and none at another: give the same leaves at every step, zeros if there is no gradient"
            )
            raise ValueError(msg)
        self._paths = paths

    def _refuse_traced(self, state: Any) -> None:
        if any(_traced(array) for array in optree.tree_leaves(state)):
            msg = (
                f"Clipper({short(self.rule)}) would remember values of code that is being compiled, which runs once: "
                "use state = rule.init(grads) outside, and clipped, state, report = rule.update(grads, state) inside"
            )
            raise TypeError(msg)


def _name(path: tuple[Any, ...]) -> str:
    """Return the fields, keys and numbers that lead to an array: what is in a file should say what it is."""
    return ".".join([str(entry.field if hasattr(entry, "field") else entry.entry) for entry in path])


def _plain(array: Any) -> Any:
    """Return the values of an array as a number or nested lists."""
    return array.tolist() if hasattr(array, "tolist") else np.asarray(array).tolist()


def _loaded(value: Any, like: Any, name: str) -> Any:
    """Return plain values as an array like another one."""
    backend, values = backend_of(like), np.asarray(value)
    values = values.reshape(like.shape) if 0 == values.size == math.prod(like.shape) else values  # [] has no shape
    if backend is None or values.shape != tuple(like.shape):
        msg = (
            f"the saved {name} has shape {values.shape}, but here it is {tuple(like.shape)}: load the state into a "
            "Clipper of the same rule on gradients of the same shapes"
        )
        raise ValueError(msg)
    with backend.quiet(like):
        return backend.to_device_of(like, backend.xp.asarray(values, dtype=like.dtype))


def _traced(array: Any) -> bool:
    backend = backend_of(array)
    return backend is not None and backend.traced(array)
