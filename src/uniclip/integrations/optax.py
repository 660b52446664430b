# SPDX-License-Identifier: MIT
"""Clipping inside optax: `to_optax` turns a rule into a gradient transformation.

It works wherever optax does, in Flax and Equinox, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from uniclip._errors import check, needs, stable
from uniclip._types import Path, Tree
from uniclip.compose import AnyRule, Chain, Masked
from uniclip.integrations import rule_for_steps
from uniclip.limits import NoState, PerGroup
from uniclip.report import LOGGED, Report
from uniclip.rule import BaseRule, Rule
from uniclip.saved import from_dict as state_from_dict
from uniclip.saved import to_dict as state_to_dict
from uniclip.scopes import all_leaves, each_leaf

with needs("optax", "optax"):
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import sparse

from uniclip.backends.jax import varying


class ClipState(NamedTuple):
    """The state of a transformation of `to_optax`: the rule's state, and the last step's scalars.

    Structure, shapes and dtypes stay those of ``init``. The structure is the same for every policy
    of a rule, so that a checkpoint can be loaded after ``nonfinite="skip"`` was added.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import to_optax
    >>> clip = to_optax(uc.by_global_norm(1.0))
    >>> _, state = clip.update(jnp.asarray([3.0, 4.0]), clip.init(jnp.zeros(2)))
    >>> float(state.clip["clip/norm"]), float(state.clip["clip/limit"])
    (5.0, 1.0)
    """

    memory: Tree
    """The state of the rule."""
    inner: optax.OptState
    """The state of the inner transformation."""
    clip: dict[str, jax.Array]
    """0-d arrays by the names of `uniclip.Report.scalars`, zeros before the first step."""
    norms: dict[str, jax.Array]
    """With ``keep_norms=True`` the norms of all leaves of the last step's gradients, before
    clipping, by their paths, such as ``"layers/0/w"``; otherwise empty.
    """


_STATE = "the state that init(params) or an earlier update of the same to_optax(rule) returned"


def to_optax(
    rule: AnyRule,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    shared: Callable[[Path, Any], bool] | None = None,
    keep_norms: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that clips by a rule.

    Parameters
    ----------
    rule : Rule or callable
        A callable gets one gradient array and returns the array to replace it.
    inner : optax.GradientTransformation, optional
        The transformation of the clipped gradients. In a skipped step the updates are zeros, and
        the state of ``inner`` does not change: moments, step counts and schedules. Later
        transformations in a chain get zeros.
    axis_name : str or tuple of str, optional
        The axis of ``jax.shard_map`` or ``jax.pmap`` along which each device holds *a shard* of the
        gradients. Omit it if each device holds all gradients (already averaged), and under
        ``jax.jit`` with sharded arrays.
    shared : callable, optional
        ``shared(path, leaf)`` is true for a leaf that is replicated along the axis, while other
        leaves are sharded. Needed if JAX does not know that: in ``jax.pmap``, and in
        ``jax.shard_map`` with ``check_vma=False``.
    keep_norms : bool, default False
        Whether the state has the norm of each leaf, for plots:
        ``optax.tree_utils.tree_get(state, "norms")``.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its ``update`` accepts the loss as ``value=``, as optax's line searches do, for rules that
        use it, such as `uniclip.skip_spikes`. Its state is a `ClipState`.

    Raises
    ------
    TypeError
        If ``rule`` is not a rule, ``inner`` not a transformation, or ``keep_norms`` not a boolean;
        in ``update``, if the state is not a `ClipState` or has other scalars than the rule, or
        ``axis_name`` or ``shared`` has another type.
    ValueError
        In ``init``, with ``keep_norms``, if two leaves have the same path; in ``update``, if the
        state belongs to another number of norms. Only the result of `to_dict` also has the leaves
        or groups of the norms, which `from_dict` compares.

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
    is_transformation = isinstance(rule, optax.GradientTransformation)
    check("rule", rule, not is_transformation, "a rule, as in to_optax(rule, inner)")
    rule = rule_for_steps(rule)

    fits = inner is None or isinstance(inner, optax.GradientTransformation)
    check("inner", inner, fits, "an optax.GradientTransformation, such as optax.adam(1e-3)")
    inner = optax.with_extra_args_support(inner or optax.identity())
    check("keep_norms", keep_norms, isinstance(keep_norms, bool), "True or False")

    def init(params: optax.Params) -> ClipState:
        if _is_placeholder(params):
            rule_state, clip = _init_for_any_params(rule)
            norms = _one_param() if keep_norms else {}
        else:
            zeros = _zeros_like(params)
            rule_state, clip = _init_for(rule, zeros, axis_name)
            norms = _zero_norms(zeros) if keep_norms else {}
        return ClipState(rule_state, inner.init(params), clip, norms)

    def update(
        grads: optax.Updates, state: ClipState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ClipState]:
        fits = isinstance(state, ClipState)
        # A rule without state returns the state that it gets.
        if fits and isinstance(rule, Rule) and not rule.stateful:
            fits = not jax.tree.leaves(state.memory)
        check("state", state, fits, _STATE)

        # Without gradients there is nothing to reduce along an axis.
        axis = axis_name if jax.tree.leaves(grads) else None
        clipped, rule_state, report = rule.update(
            grads, state.memory, params, axis, loss=extra.get("value"), shared=shared
        )

        # Compiled code cannot branch on the flag, so compute the step and select the results.
        updates, inner_state = inner.update(clipped, state.inner, params, **extra)
        if report.skipped is not None:
            zeros = jax.tree.map(jnp.zeros_like, updates)
            updates, inner_state = jax.tree.map(
                partial(jnp.where, report.skipped), (zeros, state.inner), (updates, inner_state)
            )

        # A step without gradients has fewer scalars, but the structure must stay.
        clip = state.clip | report.scalars()
        norms = state.norms
        if keep_norms:
            _, _, of_leaves = _LEAF_NORMS.update(grads, NoState(), None, axis, shared=shared)
            # The norm of an absent gradient is 0.
            norms = {name: jnp.zeros(()) for name in norms} | _by_name(of_leaves.norms)
        rule_state, clip, norms = _keep_dtypes(state, rule_state, clip, norms)
        return updates, ClipState(rule_state, inner_state, clip, norms)

    return optax.GradientTransformationExtraArgs(init, update)


def _init_for(
    rule: BaseRule, zeros: Tree, axis_name: str | tuple[str, ...] | None
) -> tuple[Tree, dict[str, jax.Array]]:
    """Return the first state of a rule and its scalars, which are 0, for zeros like parameters."""
    rule_state = rule.init(zeros)

    # A step shows the names and dtypes of the scalars. Outside `jax.shard_map` the axis is unknown.
    is_mapped = any(list(map(varying, jax.tree.leaves(zeros))))
    _, _, report = rule.update(zeros, rule_state, zeros, axis_name if is_mapped else None)
    first = report.scalars()

    # A mask may select no leaf, so that the report is empty.
    names = _names_in(report) or _names_for_any_params(rule)
    clip = {}
    for name in names:
        dtype = getattr(first.get(name), "dtype", jnp.float32)
        clip[name] = jnp.zeros((), dtype)
    return rule_state, clip


def _keep_dtypes(
    state: ClipState, rule_state: Tree, clip: dict[str, jax.Array], norms: dict[str, jax.Array]
) -> tuple[Tree, dict[str, jax.Array], dict[str, jax.Array]]:
    """Return a new state of the rule, scalars, and norms in the dtypes of an earlier state.

    Loops and compiled steps need the dtypes of ``init``.
    """
    new = (rule_state, clip, norms)
    old = (state.memory, state.clip, state.norms)
    check("state", state, jax.tree.structure(new) == jax.tree.structure(old), _STATE)

    result: tuple[Tree, dict[str, jax.Array], dict[str, jax.Array]] = jax.tree.map(
        lambda new_leaf, old_leaf: jnp.asarray(new_leaf, old_leaf.dtype), new, old
    )
    return result


_LEAF_NORMS = Rule(math.inf, scope=each_leaf)
"""A rule that changes nothing, whose report has the norm of each leaf."""


def _zero_norms(zeros: Tree) -> dict[str, jax.Array]:
    """Return norms of 0 for leaves, by their paths."""
    names = _names_of_leaves(zeros)
    for name in names:
        if names.count(name) > 1:
            msg = (
                f"keep_norms=True needs a path for each leaf, but two have the path {name!r}; "
                "rename one, or leave out keep_norms"
            )
            raise ValueError(msg)
    # One array in several places could not be donated.
    return {name: jnp.zeros(()) for name in names}


def _names_of_leaves(tree: Tree) -> list[str]:
    """Return the path of each leaf, with slashes between its keys."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_sparse)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _is_sparse(node: Tree) -> bool:
    """Return whether a node is a sparse matrix, which is one leaf of a rule."""
    return isinstance(node, sparse.JAXSparse)


def _by_name(norms: Tree) -> dict[str, jax.Array]:
    """Return the norms of leaves by their paths."""
    return dict(zip(_names_of_leaves(norms), jax.tree.leaves(norms), strict=True))


def scalars(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Return the scalars of the last step for a logger, from the state of an optimizer that clips.

    Parameters
    ----------
    opt_state : tree
        The state of a transformation with `to_optax` anywhere inside, a Flax ``TrainState``, or
        the ``opt_state`` of an ``nnx.Optimizer``.

    Returns
    -------
    dict of str to 0-d array
        As `uniclip.Report.scalars`: ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"``,
        ``"clip/share"``, and ``"clip/skipped"``, which is 0 for a rule that skips no step; empty
        for a rule that measures no norm. With several clip states the names of the first end with
        ``"/0"``, and so on, in the order of the tree; nested clip states come last. Nothing is read
        from the device.

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
    >>> {name.removeprefix("clip/"): float(value) for name, value in scalars(state).items()}
    {'norm': 5.0, 'limit': 1.0, 'factor': 0.20000000298023224, 'share': 1.0, 'skipped': 0.0}
    """
    named_scalars = {}
    states = _clip_states(opt_state)
    for number, state in enumerate(states):
        suffix = "" if len(states) == 1 else f"/{number}"

        # Compiled code sorts a dict by its keys, so restore the order of the names.
        for name in LOGGED:
            # An NNX variable holds each scalar as its only leaf.
            for scalar in jax.tree.leaves(state.clip.get(name)):
                named_scalars[name + suffix] = scalar
    return named_scalars


def to_dict(rule: AnyRule, opt_state: optax.OptState, params: optax.Params) -> dict[str, Any]:
    """Return a rule's state as plain numbers and lists, as `uniclip.Clipper.state_dict` does.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        The rule of `to_optax`.
    opt_state : tree
        The state of an optimizer with one `to_optax` anywhere inside, as in `scalars`.
    params : tree
        The parameters, which name the leaves of the norms in the state.

    Raises
    ------
    TypeError
        If the state has other shapes than that of the rule for ``params``.
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
    [state] = _clip_states(opt_state, at_most=1)
    rule = rule_for_steps(rule)
    zeros = _zeros_like(params)
    first_state = rule.init(zeros)

    # Flax wraps the arrays of a state, so compare the arrays and not the containers.
    arrays = jax.tree.leaves(state.memory)
    shapes = list(map(jnp.shape, arrays))
    expected_shapes = list(map(jnp.shape, jax.tree.leaves(first_state)))
    expected = "the state of an optimizer with this rule, for params of these shapes"
    check("opt_state", opt_state, shapes == expected_shapes, expected)

    rule_state = jax.tree.unflatten(jax.tree.structure(first_state), arrays)
    return state_to_dict(rule, rule_state, zeros)


def from_dict(
    rule: AnyRule, saved: dict[str, Any], opt_state: optax.OptState, params: optax.Params
) -> optax.OptState:
    """Return the state of an optimizer with a saved state of its rule.

    The rule's state may come from any integration, in any framework.

    Parameters
    ----------
    rule : Rule, ByValue, Chain, Masked, or callable
        The rule of `to_optax`.
    saved : dict
        The saved state; an empty dict starts with empty state.
    opt_state : tree
        The state that ``init(params)`` or ``update`` returned; the rest of it does not change.
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
    [state] = _clip_states(opt_state, at_most=1)
    rule_state = state_from_dict(rule_for_steps(rule), saved, _zeros_like(params))

    # Flax wraps the arrays of a state; the new ones go into the same containers.
    structure = jax.tree.structure(state.memory)
    new = state._replace(memory=jax.tree.unflatten(structure, jax.tree.leaves(rule_state)))
    return optax.tree_utils.tree_set(opt_state, _is_clip_state, ClipState=new)


def _clip_states(opt_state: optax.OptState, at_most: float = math.inf) -> list[ClipState]:
    """Return the clip states in the state of an optimizer, nested ones last.

    Raise if there is none, or more than ``at_most``.
    """
    found = optax.tree_utils.tree_get_all_with_path(opt_state, ClipState.__name__, _is_clip_state)
    if not 1 <= len(found) <= at_most:
        expected = "one ClipState" if at_most == 1 else "a ClipState"
        msg = (
            f"opt_state must hold {expected}, but it holds {len(found) or 'none'}; pass the state "
            "of an optimizer such as optax.chain(to_optax(rule), optax.adam(0.1)), or with several "
            "rules the state of one, such as opt_state[0]"
        )
        raise ValueError(msg)
    return [state for _, state in found]


def _is_clip_state(_path: object, node: object) -> bool:
    """Return whether a node of a tree is a clip state."""
    return isinstance(node, ClipState)


def _zeros_like(params: optax.Params) -> Tree:
    """Return zeros like parameters, without the variables of Flax NNX.

    The optimizer of Flax NNX passes variables to ``init``, but arrays to ``update``.
    """
    arrays = jax.tree.map(_without_variable, params, is_leaf=_is_variable)
    return jax.tree.map(jnp.zeros_like, arrays)


def _without_variable(leaf: Tree) -> Tree:
    """Return the contents of a variable: an array, a tree of arrays, or a masked node."""
    if not _is_variable(leaf):
        return leaf
    [contents] = jax.tree.leaves(leaf, is_leaf=lambda inner: inner is not leaf)
    return contents


def _is_variable(node: Tree) -> bool:
    """Return whether a node of a tree is a variable of Flax NNX."""
    # Flax need not be installed, so a method stands for the class.
    return hasattr(node, "get_metadata")


def _names_in(report: Report) -> list[str]:
    """Return the names of the scalars of reports like this one, which may lack gradients."""
    # A report without gradients has this field, but no scalars.
    optional = {"clip/threshold": report.thresholds}
    return [name for name in LOGGED if optional.get(name, report.finite) is not None]


# `optax.tree_map_params` calls ``init`` with a placeholder that stands for any parameters, and maps
# over the result together with the real state. Both must have the same structure, and no mask and
# no label function can be called.


def _is_placeholder(params: optax.Params) -> bool:
    """Return whether ``init`` is called by `optax.tree_map_params`: with a node without leaves."""
    structure = jax.tree.structure(params)
    return bool(structure.num_nodes == 1 and not structure.num_leaves)


def _init_for_any_params(rule: BaseRule) -> tuple[Tree, dict[str, jax.Array]]:
    """Return a state of a rule, and its scalars, with the structure for any parameters."""
    clip = dict.fromkeys(_names_for_any_params(rule), jnp.zeros(()))
    return _state_for_any_params(rule), clip


def _one_param() -> jax.Array:
    """Return a parameter that stands for any parameters."""
    return jnp.zeros(1)


def _has_state(rule: BaseRule) -> TypeGuard[Rule]:
    """Return whether a rule with norms has state."""
    return isinstance(rule, Rule) and rule.stateful


def _state_for_any_params(rule: BaseRule) -> Tree:
    """Return a state with the structure that it has for any parameters.

    If the number of its arrays depends on the parameters, a single array stands for all of them.
    """
    if isinstance(rule, Chain):
        return tuple(map(_state_for_any_params, rule.rules))
    if isinstance(rule, Masked):
        return _state_for_any_params(rule.rule)
    if not _has_state(rule):
        return rule.init(_one_param())
    # Norms along axes are stacked by their shapes.
    if rule.scope.axes is not None:
        return _one_param()

    states = [single.init(_one_param()) for single in _rules_of_one_norm(rule)]
    return tuple(states) if isinstance(rule.limit, PerGroup) else states[0]


def _names_for_any_params(rule: BaseRule) -> list[str]:
    """Return the names of the scalars of a rule's reports."""
    if isinstance(rule, Masked):
        return _names_for_any_params(rule.rule)

    names: set[str] = set()
    if isinstance(rule, Chain):
        for inner in rule.rules:
            names.update(_names_for_any_params(inner))
    elif _has_state(rule):
        for single in _rules_of_one_norm(rule):
            _, _, report = single.update(_one_param(), single.init(_one_param()), _one_param())
            names.update(_names_in(report))
    else:
        _, _, report = rule.update({}, rule.init({}), {})
        names.update(_names_in(report))
    return [name for name in LOGGED if name in names]


def _rules_of_one_norm(rule: Rule) -> list[Rule]:
    """Return rules with one norm of all leaves and the limit of one group, in state order."""
    limits = [rule.limit]
    if isinstance(rule.limit, PerGroup):
        # The states of groups are sorted by their labels.
        by_label = sorted(rule.limit.limits, key=lambda pair: stable(repr(pair[0])))
        limits = [limit for _, limit in by_label]
    return [dataclasses.replace(rule, limit=limit, scope=all_leaves) for limit in limits]
