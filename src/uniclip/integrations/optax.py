# SPDX-License-Identifier: MIT
"""Clipping inside optax: `to_optax` makes a rule a gradient transformation, for Flax and Equinox too."""

from __future__ import annotations

from uniclip.integrations import needs, rule_for_steps

with needs("optax", "optax"):
    import jax
    import jax.numpy as jnp
    import optax

from functools import partial
from typing import Any, NamedTuple

from uniclip._checks import check
from uniclip._repr import short
from uniclip.decide import Report

_REDUCTIONS = {"sum": jax.lax.psum, "max": jax.lax.pmax}


class ClipState(NamedTuple):
    """The state of what `to_optax` returns: what the rule remembers, and what a logger shows of the last step.

    The last five are 0-d arrays, zeros before the first step, and ``None`` of a rule that measures no norm; see
    `uniclip.Report.scalars`. Structure, shapes and dtypes are those of ``init`` from then on.
    """

    memory: Any
    """The state of the rule."""
    inner: Any
    """The state of the inner transformation."""
    norm: Any = None
    """The largest norm before clipping."""
    limit: Any = None
    """The smallest limit."""
    factor: Any = None
    """The smallest factor."""
    share: Any = None
    """The share of the factors that are not 1."""
    skipped: Any = None
    """1 if the step was left out, else 0; ``None`` of a rule that leaves none out."""


def to_optax(rule: Any, inner: Any = None, *, axis_name: Any = None) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that clips by a rule.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        A callable gets one gradient array and returns the array to put in its place.
    inner : optax.GradientTransformation, optional
        What gets the clipped gradients. In a step that the rule leaves out the updates are zeros and the state of
        ``inner`` stays as it was: moments, step counts and schedules too. What follows in a chain sees only zeros.
    axis_name : str or tuple of str, optional
        The axis of ``jax.shard_map`` or ``jax.pmap`` along which each device holds *a part* of the gradients. Leave
        it out where each holds all of them (they were averaged before), and under ``jax.jit`` with sharded arrays.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its ``update`` takes ``value=``, the loss, as optax's line searches do, for rules that look at it, such as
        that of `uniclip.skip_spikes`. Its state is a `ClipState`.

    Raises
    ------
    TypeError
        If ``rule`` is no rule, or ``inner`` no transformation.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import scalars, to_optax
    >>> optimizer = optax.chain(to_optax(uc.by_global_norm(1.0)), optax.sgd(1.0))
    >>> params = {"w": jnp.zeros(2)}
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": jnp.asarray([3.0, 4.0])}, state, params)
    >>> updates["w"].tolist(), float(scalars(state)["clip/norm"])
    ([-0.6000000238418579, -0.800000011920929], 5.0)
    """
    rule = rule_for_steps(rule)
    wanted = "an optax.GradientTransformation, such as optax.adam(1e-3)"
    check("inner", inner, inner is None or isinstance(inner, optax.GradientTransformation), wanted)
    inside = optax.with_extra_args_support(optax.identity() if inner is None else inner)
    all_reduce = None if axis_name is None else partial(_all_reduce, axis_name)

    def init(params: Any) -> ClipState:
        zeros = jax.tree.map(_zeros, params, is_leaf=_is_variable)
        memory = rule.init(zeros)
        _, _, report = rule.update(zeros, memory, zeros)  # which numbers there are, and their dtypes
        return ClipState(memory, inside.init(params), **_nothing_seen(report))

    def update(grads: Any, state: ClipState, params: Any = None, **extra: Any) -> tuple[Any, ClipState]:
        if not _is_clip_state(state):
            raise TypeError(_not_its_state(rule, f", got {type(state).__name__}"))
        loss = extra.get("value")
        clipped, memory, report = rule.update(grads, state.memory, params, all_reduce, loss=loss)
        updates, inner_state = inside.update(clipped, state.inner, params, **extra)
        if report.skipped is not None:
            left_out = jax.tree.map(jnp.zeros_like, updates), state.inner
            updates, inner_state = jax.tree.map(partial(jnp.where, report.skipped), left_out, (updates, inner_state))
        old = state._replace(inner=None)
        new = old._replace(memory=memory, **_seen(report))
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(_not_its_state(rule, ", and this one was made by another rule"))
        return updates, jax.tree.map(_typed, new, old)._replace(inner=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def scalars(opt_state: Any) -> dict[str, Any]:
    """Return what a logger shows of the last step, from the state of an optimizer that clips.

    Parameters
    ----------
    opt_state : tree
        The state of a transformation with `to_optax` anywhere inside; a Flax ``TrainState``, and the ``opt_state``
        of an ``nnx.Optimizer``, too.

    Returns
    -------
    dict of str to 0-d array
        As `uniclip.Report.scalars`: ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"``, ``"clip/share"``, and of a
        rule that may leave a step out ``"clip/skipped"``. Of several clip states the first one's names end with
        ``"/0"``, and so on, in the order of the tree. Nothing is read from the device.

    Raises
    ------
    ValueError
        If there is no clip state.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import scalars, to_optax
    >>> optimizer = optax.chain(to_optax(uc.by_global_norm(1.0)), optax.adam(0.1))
    >>> grads = jnp.asarray([3.0, 4.0])
    >>> _, state = optimizer.update(grads, optimizer.init(grads))
    >>> {name: round(float(value), 2) for name, value in scalars(state).items()}
    {'clip/norm': 5.0, 'clip/limit': 1.0, 'clip/factor': 0.2, 'clip/share': 1.0}
    """
    states = _clip_states(opt_state)
    if not states:
        msg = (
            "opt_state holds no ClipState: put to_optax(rule) into the optimizer, as in "
            "optax.chain(to_optax(rule), optax.adam(1e-3)), and pass the state that its init or update returns"
        )
        raise ValueError(msg)
    suffixes = [""] if len(states) == 1 else [f"/{number}" for number in range(len(states))]
    return {
        f"clip/{name}{suffix}": array
        for suffix, state in zip(suffixes, states, strict=True)
        for name, value in zip(ClipState._fields[2:], state[2:], strict=True)
        for array in jax.tree.leaves(value)  # one or none; NNX puts each into a variable
    }


def _not_its_state(rule: Any, why: str) -> str:
    wanted = f"what init returned, or the update before, of to_optax({short(rule)})"
    return f"state must be {wanted}{why}: begin with init(params)"


def _is_variable(node: Any) -> bool:
    """Whether a node is a variable of Flax NNX; its optimizer gives them to ``init``, and arrays to ``update``."""
    return hasattr(node, "get_value") and hasattr(node, "get_metadata")


def _zeros(leaf: Any) -> Any:
    return jnp.zeros_like(leaf.get_value() if _is_variable(leaf) else leaf)


def _all_reduce(axis_name: Any, array: Any, op: str) -> Any:
    return _REDUCTIONS[op](array, axis_name)


def _seen(report: Report) -> dict[str, Any]:
    """Return the numbers of a report by the fields of `ClipState`."""
    return {name.removeprefix("clip/"): value for name, value in report.scalars().items()}


def _nothing_seen(report: Report) -> dict[str, Any]:
    """Return zeros for the numbers that such reports have, also where the tree had no leaves."""
    if report.finite is None:
        return {}
    seen = _seen(report)
    names = ClipState._fields[2:] if report.skipped is not None else ClipState._fields[2:-1]
    return {name: jnp.zeros((), seen[name].dtype if name in seen else jnp.float32) for name in names}


def _typed(new: Any, old: Any) -> Any:
    """Return a part of the state in the dtype that `init` gave it: loops and compiled steps need the same ones."""
    return jnp.asarray(new, old.dtype)


def _clip_states(tree: Any) -> list[ClipState]:
    """Return every `ClipState` in a tree, one inside another after it."""
    found = filter(_is_clip_state, jax.tree.leaves(tree, is_leaf=_is_clip_state))
    return [state for outer in found for state in (outer, *_clip_states(outer.inner))]


def _is_clip_state(node: Any) -> bool:
    return isinstance(node, ClipState)
