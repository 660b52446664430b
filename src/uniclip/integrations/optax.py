# SPDX-License-Identifier: MIT
"""Clipping inside optax: `to_optax` makes a rule a gradient transformation,
for Flax and Equinox too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from uniclip._errors import check, needs, stable
from uniclip.compose import AnyRule, Chain, Masked
from uniclip.integrations import rule_for_steps
from uniclip.limits import PerGroup
from uniclip.report import LOGGED, Report
from uniclip.rule import Rule
from uniclip.saved import from_dict as state_from_dict
from uniclip.saved import to_dict as state_to_dict
from uniclip.scopes import all_leaves

with needs("optax", "optax"):
    import jax
    import jax.numpy as jnp
    import optax

from uniclip.backends.jax import varying


class ClipState(NamedTuple):
    """The state of a transformation of `to_optax`: the rule's memory, and the last step's scalars.

    Structure, shapes and dtypes stay those of ``init``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import to_optax
    >>> clip = to_optax(uc.by_global_norm(1.0))
    >>> _, state = clip.update(jnp.asarray([3.0, 4.0]), clip.init(jnp.zeros(2)))
    >>> {name: round(float(value), 3) for name, value in sorted(state.clip.items())}
    {'clip/factor': 0.2, 'clip/limit': 1.0, 'clip/norm': 5.0, 'clip/share': 1.0}
    """

    memory: Any
    """The state of the rule."""
    inner: Any
    """The state of the inner transformation."""
    clip: dict[str, Any]
    """0-d arrays by the names of `uniclip.Report.scalars`, zeros before the first step."""


def to_optax(
    rule: AnyRule,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    shared: Callable[[Any, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that clips by a rule.

    Parameters
    ----------
    rule : Rule or callable
        A callable gets one gradient array and returns the array to put in its place.
    inner : optax.GradientTransformation, optional
        The transformation of the clipped gradients. In a step that the rule skips the updates are
        zeros, and the state of ``inner`` stays as it was: moments, step counts and schedules. Later
        transformations in a chain see zeros.
    axis_name : str or tuple of str, optional
        The axis of ``jax.shard_map`` or ``jax.pmap`` along which each device holds *a part* of the
        gradients. Omit it where each device holds all gradients (averaged before), and under
        ``jax.jit`` with sharded arrays.
    shared : callable, optional
        ``shared(path, leaf)`` is true for a leaf that is the same on all devices of the axis, while
        they hold parts of others. Needed where JAX does not know that: in ``jax.pmap``, and in
        ``jax.shard_map`` with ``check_vma=False``.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its ``update`` accepts the loss as ``value=``, as optax's line searches do, for rules that
        use it, such as `uniclip.skip_spikes`. Its state is a `ClipState`.

    Raises
    ------
    TypeError
        If ``rule`` is not a rule, or ``inner`` not a transformation; in ``update``, if the state is
        not a `ClipState` or has other scalars than the rule, or ``axis_name`` or ``shared`` has
        another type.
    ValueError
        In ``update``, if the state is that of another number of norms. Which leaves or groups they
        belong to is known, and compared, in what `to_dict` returns.

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
    check(
        "rule",
        rule,
        not isinstance(rule, optax.GradientTransformation),
        "a rule, as in to_optax(rule, inner)",
    )
    rule = rule_for_steps(rule)
    wanted = "an optax.GradientTransformation, such as optax.adam(1e-3)"
    check("inner", inner, inner is None or isinstance(inner, optax.GradientTransformation), wanted)
    inside = optax.with_extra_args_support(inner or optax.identity())
    own = "what init(params), or an update before, of the same to_optax(rule) returned"

    def init(params: Any) -> ClipState:
        structure = jax.tree.structure(params)
        if structure.num_nodes == 1 and not structure.num_leaves:  # as in optax.tree_map_params
            logged = _names_for_any_params(rule)
            return ClipState(
                _memory_for_any_params(rule),
                inside.init(params),
                dict.fromkeys(logged, jnp.zeros(())),
            )

        zeros = _zeros_like(params)
        memory = rule.init(zeros)
        axis = axis_name if any(map(varying, jax.tree.leaves(zeros))) else None
        _, _, report = rule.update(zeros, memory, zeros, axis)
        seen = report.scalars()
        # A mask may choose none of the leaves.
        logged = _names_in(report) or _names_for_any_params(rule)
        first = {
            name: jnp.zeros((), getattr(seen.get(name), "dtype", jnp.float32)) for name in logged
        }
        return ClipState(memory, inside.init(params), first)

    def update(
        grads: Any, state: ClipState, params: Any = None, **extra: Any
    ) -> tuple[Any, ClipState]:
        check("state", state, isinstance(state, ClipState), own)
        axis, loss = axis_name if jax.tree.leaves(grads) else None, extra.get("value")
        clipped, memory, report = rule.update(
            grads, state.memory, params, axis, loss=loss, shared=shared
        )
        updates, inner_state = inside.update(clipped, state.inner, params, **extra)
        if report.skipped is not None:
            left_out = jax.tree.map(jnp.zeros_like, updates), state.inner
            updates, inner_state = jax.tree.map(
                partial(jnp.where, report.skipped), left_out, (updates, inner_state)
            )
        # Loops and compiled steps need the dtypes of init; a step without gradients has not all
        # scalars.
        new, old = (memory, state.clip | report.scalars()), (state.memory, state.clip)
        check("state", state, jax.tree.structure(new) == jax.tree.structure(old), own)
        memory, clip = jax.tree.map(lambda array, known: jnp.asarray(array, known.dtype), new, old)
        return updates, ClipState(memory, inner_state, clip)

    return optax.GradientTransformationExtraArgs(init, update)


def scalars(opt_state: Any) -> dict[str, Any]:
    """Return the scalars of the last step for a logger, from the state of an optimizer that clips.

    Parameters
    ----------
    opt_state : tree
        The state of a transformation with `to_optax` anywhere inside; a Flax ``TrainState``, and
        the ``opt_state`` of an ``nnx.Optimizer``, too.

    Returns
    -------
    dict of str to 0-d array
        As `uniclip.Report.scalars`: ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"``,
        ``"clip/share"``, and for a rule that may skip a step ``"clip/skipped"``; empty for a rule
        that measures no norm. With several clip states the names of the first end with ``"/0"``,
        and so on, in the order of the tree; those inside of others come last. Nothing is read from
        the device.

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
    ends = [""] if len(states) == 1 else [f"/{number}" for number in range(len(states))]
    return {
        name + end: array
        for end, state in zip(ends, states, strict=True)
        for name in LOGGED  # compiled code returns a dict in the order of its keys
        # One or none; NNX puts each into a variable.
        for array in jax.tree.leaves(state.clip.get(name))
    }


def to_dict(rule: Any, opt_state: Any, params: Any) -> dict[str, Any]:
    """Return a rule's memory as plain numbers and lists, as `uniclip.Clipper.state_dict` does.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        That of `to_optax`.
    opt_state : tree
        The state of an optimizer with one `to_optax` anywhere inside; as in `scalars`.
    params : tree
        They name the leaves of the norms in the state.

    Raises
    ------
    TypeError
        If the state's memory has other shapes than that of the rule for ``params``.
    ValueError
        If there is no clip state, or several.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import to_dict, to_optax
    >>> rule, params = uc.norm_growth(), {"w": jnp.zeros(2)}
    >>> optimizer = optax.chain(to_optax(rule), optax.adam(0.1))
    >>> _, state = optimizer.update({"w": jnp.asarray([3.0, 4.0])}, optimizer.init(params))
    >>> to_dict(rule, state, params)["state"]
    {'averages': [5.0], 'count': 1}
    """
    [state] = _clip_states(opt_state, most=1)
    rule, zeros = rule_for_steps(rule), _zeros_like(params)
    first, arrays = rule.init(zeros), jax.tree.leaves(state.memory)
    fits = list(map(jnp.shape, arrays)) == list(map(jnp.shape, jax.tree.leaves(first)))
    check(
        "opt_state",
        opt_state,
        fits,
        "that of an optimizer with this rule, for params of these shapes",
    )
    return state_to_dict(rule, jax.tree.unflatten(jax.tree.structure(first), arrays), zeros)


def from_dict(rule: Any, saved: dict[str, Any], opt_state: Any, params: Any) -> Any:
    """Return the state of an optimizer with a rule's memory that was saved before.

    It may be that of any integration, in any framework.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        That of `to_optax`.
    saved : dict
        An empty dict starts over.
    opt_state : tree
        The state of ``init(params)`` or ``update``; the rest of it stays as it is.
    params : tree

    Raises
    ------
    TypeError
        If ``saved`` is not a dict.
    ValueError
        If there is no clip state, or several, or one with more or fewer arrays; if ``saved``
        belongs to another rule or other leaves.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import from_dict, to_dict, to_optax
    >>> rule, params = uc.norm_growth(), {"w": jnp.zeros(2)}
    >>> optimizer = optax.chain(to_optax(rule), optax.adam(0.1))
    >>> _, state = optimizer.update({"w": jnp.asarray([3.0, 4.0])}, optimizer.init(params))
    >>> saved = to_dict(rule, state, params)
    >>> state = from_dict(rule, saved, optimizer.init(params), params)
    >>> float(state[0].memory.averages[0])
    5.0
    """
    [state] = _clip_states(opt_state, most=1)
    memory = jax.tree.leaves(state_from_dict(rule_for_steps(rule), saved, _zeros_like(params)))
    new = state._replace(memory=jax.tree.unflatten(jax.tree.structure(state.memory), memory))
    return optax.tree_utils.tree_set(opt_state, _is_clip_state, ClipState=new)


def _clip_states(opt_state: Any, most: float = math.inf) -> list[ClipState]:
    """Return the clip states in the state of an optimizer, from one to ``most``.

    Those inside of others come last.
    """
    found = optax.tree_utils.tree_get_all_with_path(opt_state, ClipState.__name__, _is_clip_state)
    if not 1 <= len(found) <= most:
        wanted = "one ClipState" if most == 1 else "a ClipState"
        msg = (
            f"opt_state must hold {wanted}, and it holds {len(found) or 'none'}: pass the state "
            "of an optimizer, as of optax.chain(to_optax(rule), optax.adam(0.1)); of one with "
            "several rules, the part of one, opt_state[0]"
        )
        raise ValueError(msg)
    return [state for _, state in found]


def _is_clip_state(_: Any, node: Any) -> bool:
    return isinstance(node, ClipState)


def _zeros_like(params: Any) -> Any:
    """Return zeros like parameters.

    The optimizer of Flax NNX gives ``init`` variables, and ``update`` arrays.
    """
    return jax.tree.map(
        jnp.zeros_like, jax.tree.map(_without_variable, params, is_leaf=_is_variable)
    )


def _without_variable(leaf: Any) -> Any:
    """Return what a variable holds: an array, a tree of arrays,
    or a node without one where a mask leaves it out.
    """
    if not _is_variable(leaf):
        return leaf
    [value] = jax.tree.leaves(leaf, is_leaf=lambda inner: inner is not leaf)
    return value


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_metadata")


def _names_in(report: Report) -> list[str]:
    """Return the names of the scalars of such reports, of which one of no gradient has none."""
    optional = {"clip/threshold": report.thresholds, "clip/skipped": report.skipped}
    return [name for name in LOGGED if optional.get(name, report.finite) is not None]


# optax.tree_map_params asks for a state by a node without children, in the place of any parameters,
# and maps over what it gets and the real state together. So both must have the same structure, and
# no mask and no label may be asked.


def _one() -> jax.Array:
    """Return a parameter that stands for all."""
    return jnp.zeros(1)


def _memory_for_any_params(rule: Any) -> Any:
    """Return a memory with the structure that it has for all parameters.

    Where the number of its arrays depends on the parameters, a single array stands for all of it.
    """
    if isinstance(rule, Chain):
        return tuple(map(_memory_for_any_params, rule.rules))
    if isinstance(rule, Masked):
        return _memory_for_any_params(rule.rule)
    if not (isinstance(rule, Rule) and rule.stateful):
        return rule.init(_one())
    if rule.scope.axes is not None:
        return _one()

    memories = [one.init(_one()) for one in _rules_of_one_norm(rule)]
    return tuple(memories) if isinstance(rule.limit, PerGroup) else memories[0]


def _names_for_any_params(rule: Any) -> list[str]:
    """Return the names of the scalars of a rule's reports."""
    if isinstance(rule, Chain):
        of_rules = {name for one in rule.rules for name in _names_for_any_params(one)}
        return [name for name in LOGGED if name in of_rules]
    if isinstance(rule, Masked):
        return [name for name in _names_for_any_params(rule.rule) if name != "clip/skipped"]
    if not (isinstance(rule, Rule) and rule.stateful):
        return _names_in(rule.update({}, rule.init({}), {})[2])

    reports = [one.update(_one(), one.init(_one()), _one())[2] for one in _rules_of_one_norm(rule)]
    found = {name for report in reports for name in _names_in(report)}
    return [name for name in LOGGED if name in found]


def _rules_of_one_norm(rule: Rule) -> list[Rule]:
    """Return rules that measure one norm of all leaves, with the limit of each group,
    in the order of their states.
    """
    limits = [rule.limit]
    if isinstance(rule.limit, PerGroup):
        limits = [
            limit for _, limit in sorted(rule.limit.limits, key=lambda pair: stable(repr(pair[0])))
        ]
    return [dataclasses.replace(rule, limit=limit, scope=all_leaves) for limit in limits]
