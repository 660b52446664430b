# SPDX-License-Identifier: MIT
"""Clipping inside optax: `to_optax` makes a rule a gradient transformation, for Flax and Equinox too."""

from __future__ import annotations

from uniclip._errors import needs
from uniclip.integrations import rule_for_steps

with needs("optax", "optax"):
    import jax
    import jax.numpy as jnp
    import optax

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optree

from uniclip._errors import check, short
from uniclip.arraywise import AnyRule
from uniclip.backends.jax import names_of, varying
from uniclip.labels import identity, labels_of, leaves_of, shown
from uniclip.report import Report
from uniclip.saved import from_dict as state_from_dict
from uniclip.saved import to_dict as state_to_dict
from uniclip.tree import flatten


class ClipState(NamedTuple):
    """The state of a transformation of `to_optax`: the rule's memory, and the scalars of the last step.

    The fields between ``inner`` and ``leaves`` are 0-d arrays, zeros before the first step, and ``None`` for a rule
    that measures no norm; see `uniclip.Report.scalars`. Structure, shapes and dtypes stay those of ``init``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from uniclip.integrations.optax import to_optax
    >>> clip = to_optax(uc.by_global_norm(1.0))
    >>> _, state = clip.update(jnp.asarray([3.0, 4.0]), clip.init(jnp.zeros(2)))
    >>> type(state).__name__, float(state.norm), round(float(state.factor), 3)
    ('ClipState', 5.0, 0.2)
    """

    memory: Any
    """The state of the rule."""
    inner: Any
    """The state of the inner transformation."""
    norm: Any = None
    """The largest norm before clipping."""
    limit: Any = None
    """The smallest limit."""
    threshold: Any = None
    """The smallest norm that is clipped; ``None`` if that is the limit."""
    factor: Any = None
    """The smallest factor."""
    share: Any = None
    """The share of the factors that are not 1."""
    skipped: Any = None
    """1 if the step was skipped, else 0; ``None`` for a rule that skips none."""
    leaves: Any = None
    """Checksums of the kind of the rule and of each leaf or group in its memory; ``None`` for a rule without memory."""


_SEEN = ClipState._fields[2:-1]
"""The fields with scalars for loggers."""


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
        The transformation of the clipped gradients. In a step that the rule skips the updates are zeros, and the state
        of ``inner`` stays as it was: moments, step counts and schedules. Later transformations in a chain see zeros.
    axis_name : str or tuple of str, optional
        The axis of ``jax.shard_map`` or ``jax.pmap`` along which each device holds *a part* of the gradients. Omit
        it where each device holds all gradients (averaged before), and under ``jax.jit`` with sharded arrays.
    shared : callable, optional
        ``shared(path, leaf)`` is true for a leaf that is the same on all devices of the axis, while they hold parts of
        others. Needed where JAX does not know that: in ``jax.pmap``, and in ``jax.shard_map`` with
        ``check_vma=False``.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its ``update`` accepts the loss as ``value=``, as optax's line searches do, for rules that use it, such as
        `uniclip.skip_spikes`. Its state is a `ClipState`.

    Raises
    ------
    TypeError
        If ``rule`` is not a rule, or ``inner`` not a transformation; in ``update``, if the state is not a `ClipState`.
    ValueError
        In ``update``, if the state of a rule with memory belongs to other leaves or groups, or to another rule;
        in compiled code only if the number of leaves differs.

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
    if isinstance(rule, optax.GradientTransformation):
        msg = "rule is a gradient transformation: the arguments are swapped, it is to_optax(rule, inner)"
        raise TypeError(msg)
    rule = rule_for_steps(rule)
    wanted = "an optax.GradientTransformation, such as optax.adam(1e-3)"
    check("inner", inner, inner is None or isinstance(inner, optax.GradientTransformation), wanted)
    inside = optax.with_extra_args_support(optax.identity() if inner is None else inner)
    check(
        "axis_name", axis_name, axis_name is None or names_of(axis_name) is not None, "the name of an axis, or a tuple"
    )
    check("shared", shared, shared is None or callable(shared), "a function of (path, leaf)")

    def init(params: Any) -> ClipState:
        zeros = _all_zeros(params)
        memory = rule.init(zeros)
        here = axis_name if any(map(varying, jax.tree.leaves(zeros))) else None
        _, _, report = rule.update(zeros, memory, zeros, here)  # the fields that exist, and their dtypes
        known = jnp.asarray(_checksums(rule, zeros)) if rule.memory else None
        return ClipState(memory, inside.init(params), **_nothing_seen(report), leaves=known)

    def update(grads: Any, state: ClipState, params: Any = None, **extra: Any) -> tuple[Any, ClipState]:
        if not _is_clip_state(state):
            raise TypeError(_not_its_state(rule, f", got {type(state).__name__}"))
        if rule.memory:
            _refuse_others(rule, state.leaves, grads)
        loss = extra.get("value")
        clipped, memory, report = rule.update(grads, state.memory, params, axis_name, loss=loss, shared=shared)
        updates, inner_state = inside.update(clipped, state.inner, params, **extra)
        if report.skipped is not None:
            left_out = jax.tree.map(jnp.zeros_like, updates), state.inner
            updates, inner_state = jax.tree.map(partial(jnp.where, report.skipped), left_out, (updates, inner_state))
        old = state._replace(inner=None, leaves=None)
        new = old._replace(memory=memory, **_seen(report))
        if jax.tree.structure(new) != jax.tree.structure(old):
            raise ValueError(_not_its_state(rule, ", and this one was made by another rule"))
        return updates, jax.tree.map(_typed, new, old)._replace(inner=inner_state, leaves=_as_array(state.leaves))

    return optax.GradientTransformationExtraArgs(init, update)


def scalars(opt_state: Any) -> dict[str, Any]:
    """Return the scalars of the last step for a logger, from the state of an optimizer that clips.

    Parameters
    ----------
    opt_state : tree
        The state of a transformation with `to_optax` anywhere inside; a Flax ``TrainState``, and the ``opt_state``
        of an ``nnx.Optimizer``, too.

    Returns
    -------
    dict of str to 0-d array
        As `uniclip.Report.scalars`: ``"clip/norm"``, ``"clip/limit"``, ``"clip/factor"``, ``"clip/share"``, and for a
        rule that may skip a step ``"clip/skipped"``. With several clip states the names of the first end with
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
        for name, value in zip(_SEEN, state[2:-1], strict=True)
        for array in jax.tree.leaves(value)  # one or none; NNX puts each into a variable
    }


def to_dict(rule: Any, opt_state: Any, params: Any) -> dict[str, Any]:
    """Return a rule's memory as plain numbers and lists, in the format of `uniclip.Clipper.state_dict`.

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
    ValueError
        If there is no clip state, or several, or it belongs to another rule or other leaves.

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
    rule, state, zeros = rule_for_steps(rule), _only(opt_state), _all_zeros(params)
    if not rule.memory:
        return {}
    _refuse_others(rule, next(iter(jax.tree.leaves(state.leaves)), None), zeros)
    spec = optree.tree_structure(rule.init(zeros))
    return state_to_dict(rule, optree.tree_unflatten(spec, jax.tree.leaves(state.memory)), zeros)


def from_dict(rule: Any, saved: dict[str, Any], opt_state: Any, params: Any) -> Any:
    """Return the state of an optimizer with a rule's memory that was saved by any integration, in any framework.

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
        If there is no clip state, or several; if ``saved`` belongs to another rule or other leaves.

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
    state = _only(opt_state)
    memory = state_from_dict(rule_for_steps(rule), saved, _all_zeros(params))
    new = jax.tree.unflatten(jax.tree.structure(state.memory), jax.tree.leaves(memory))

    def changed(node: Any) -> Any:
        return node._replace(memory=new) if _is_clip_state(node) else node

    return jax.tree.map(changed, opt_state, is_leaf=_is_clip_state)


def _only(opt_state: Any) -> ClipState:
    """Return the one clip state of an optimizer."""
    states = _clip_states(opt_state)
    if len(states) != 1:
        msg = (
            f"opt_state holds {len(states) or 'no'} ClipState{'s' * (len(states) > 1)}, and one was expected: pass the "
            "state of an optimizer with to_optax(rule) inside, of several the part that holds the one, opt_state[0]"
        )
        raise ValueError(msg)
    return states[0]


def _all_zeros(params: Any) -> Any:
    return jax.tree.map(_zeros, params, is_leaf=_is_variable)


def _not_its_state(rule: Any, why: str) -> str:
    wanted = f"what init returned, or the update before, of to_optax({short(rule)})"
    return f"state must be {wanted}{why}: begin with init(params)"


def _checksums(rule: Any, grads: Any) -> Any:
    """Return a checksum of the kind of the rule, and of each leaf or group in its memory."""
    texts = [identity(rule), *labels_of(leaves_of(rule, flatten(grads)))]
    return np.asarray(list(map(_checksum, texts)), np.int32)


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode()) >> 1  # int32, which JAX has everywhere, holds 31 bits


def _refuse_others(rule: Any, known: Any, grads: Any) -> None:
    """Refuse a state of other leaves, naming them if the checksums can be read."""
    here = _checksums(rule, grads)
    begin = "begin with init(params), or if they surely are the same, state._replace(leaves=init(params).leaves)"
    if known is None or known.shape != here.shape:
        of = "does not say whose norms it holds" if known is None else f"is of {known.size - 1} leaves or groups"
        msg = f"the state of to_optax({short(rule)}) {of}, and here are {here.size - 1}: {begin}"
        raise ValueError(msg)
    if isinstance(known, jax.core.Tracer) or not getattr(known, "is_fully_addressable", True):
        return
    saved = np.asarray(known)
    if np.all(saved == here):
        return
    if saved[0] != here[0]:
        raise ValueError(_not_its_state(rule, ", and this one is that of another kind of rule"))
    labels = labels_of(leaves_of(rule, flatten(grads)))
    extra = [label for label in labels if _checksum(label) not in saved[1:].tolist()]
    what = f"no norms of {shown(extra)}, but of as many others" if extra else "their norms in another order"
    msg = f"the state of to_optax({short(rule)}) is that of other leaves: it holds {what}; {begin}"
    raise ValueError(msg)


def _is_variable(node: Any) -> bool:
    """Whether a node is a Flax NNX variable; its optimizer passes these to ``init``, and arrays to ``update``."""
    return hasattr(node, "get_value") and hasattr(node, "get_metadata")


def _zeros(leaf: Any) -> Any:
    return jnp.zeros_like(leaf.get_value() if _is_variable(leaf) else leaf)


def _seen(report: Report) -> dict[str, Any]:
    """Return the numbers of a report by the fields of `ClipState`."""
    return {name.removeprefix("clip/"): value for name, value in report.scalars().items()}


def _nothing_seen(report: Report) -> dict[str, Any]:
    """Return zeros for the numbers of such reports, also for a tree without leaves."""
    if report.finite is None:
        return {}
    seen = _seen(report)
    none = {name for name, value in (("skipped", report.skipped), ("threshold", report.thresholds)) if value is None}
    names = [name for name in _SEEN if name not in none]
    return {name: jnp.zeros((), seen[name].dtype if name in seen else jnp.float32) for name in names}


def _typed(new: Any, old: Any) -> Any:
    """Return a part of the state in the dtypes of `init`, which loops and compiled steps must keep."""
    return jnp.asarray(new, old.dtype)


def _as_array(checksums: Any) -> Any:
    """Return checksums as a JAX array; Flax reads NumPy arrays from files."""
    return None if checksums is None else jnp.asarray(checksums)


def _clip_states(tree: Any) -> list[ClipState]:
    """Return every `ClipState` in a tree; nested ones come after the one that contains them."""
    found = filter(_is_clip_state, jax.tree.leaves(tree, is_leaf=_is_clip_state))
    return [state for outer in found for state in (outer, *_clip_states(outer.inner))]


def _is_clip_state(node: Any) -> bool:
    return isinstance(node, ClipState)
