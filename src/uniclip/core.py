# SPDX-License-Identifier: MIT
"""What rules do to a tree of gradients: clip it, measure it, or replace it array by array."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip._checks import flag, refuse_in_step
from uniclip._repr import describe, short
from uniclip.absent import Filled, filled
from uniclip.backends import backend_of
from uniclip.decide import Report, decide
from uniclip.gradients import Gradients, Leaf, read
from uniclip.limits import NoState
from uniclip.losses import Loss
from uniclip.measure import AllReduce, measure, same_shape
from uniclip.scopes import each_leaf
from uniclip.tree import Tree, flatten_grads

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.norms import Norm
    from uniclip.rules import Rule
    from uniclip.scopes import Scope


_NO_STATE = NoState()


def reduced(rule: Rule, grads: Any, params: Any, all_reduce: AllReduce | None, *, mean: bool) -> tuple[Any, Report]:
    """Clip the gradients of examples, and return their sum or mean along the first axis."""
    whole, given = _read(rule, grads, _NO_STATE, params, all_reduce)
    with given.backend.quiet(given.first):
        decision = decide(rule, given, _NO_STATE, params, all_reduce)
        return whole.emptied(decision.reduced(rule, mean=mean)), decision.report()


def _read(
    rule: Rule,
    grads: Any,
    state: Any,
    params: Any,
    all_reduce: AllReduce | None,
    *,
    in_place: bool = False,
    loss: Any = None,
) -> tuple[Filled, Gradients]:
    """Check what a step is given, and read its gradients, and what stands for those that other processes may have."""
    refuse_in_step(all_reduce, None if isinstance(loss, Loss) else loss, params)
    if all_reduce is None:
        return Filled(grads), read(grads, rule.scope, in_place=in_place)
    whole = filled(rule.scope, grads, params, state)
    return whole, read(whole.grads, rule.scope, in_place=in_place)._replace(absent=whole.absent)


def apply_function(grads: Any, function: Callable[[Any], Any], *, in_place: bool = False) -> tuple[Any, Report]:
    """Replace each gradient array by a function of it alone."""
    return apply(grads, partial(_of_function, function, in_place), in_place=in_place)


def _of_function(
    function: Callable[[Any], Any],
    in_place: bool,  # noqa: FBT001 - bound by position
    backend: Backend,
    array: Any,
) -> tuple[Any, ...]:
    """Call a function of a whole array, and prepare to put the result in its place."""
    result = function(array)
    if backend_of(result) is not backend or not same_shape(result.shape, array.shape):
        hint = f"; call {short(function)} first" if hasattr(result, "update") else ""
        msg = f"the function must return an array like the one it got, but it returned {describe(result)}{hint}"
        raise TypeError(msg)
    kinds = ("complex floating", "real floating")  # what holds one holds those after it, and integers
    wide, narrow = ([backend.xp.isdtype(a.dtype, kind) for kind in kinds] for a in (result, array))
    if in_place and wide > narrow:
        msg = f"an array of {array.dtype} cannot hold the result, which is {describe(result)}; use uc.clip"
        raise TypeError(msg)
    return lambda _, new: new, result


def update(
    rule: Rule,
    grads: Any,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    *,
    in_place: bool = False,
    loss: Any = None,
) -> tuple[Any, Any, Report]:
    """Clip ``grads`` by ``rule``; see `Rule.update`."""
    whole, given = _read(rule, grads, state, params, all_reduce, in_place=flag("in_place", in_place), loss=loss)
    with given.backend.quiet(given.first):
        decision = decide(rule, given, state, params, all_reduce, loss=loss)
        return whole.emptied(decision.clipped(rule)), decision.state, decision.report()


def measured(
    rule: Rule,
    grads: Any,
    state: Any,
    params: Any = None,
    all_reduce: AllReduce | None = None,
    norm: Any = None,
    loss: Any = None,
) -> tuple[Any, Report]:
    """Return what `update` does, but for the scaled gradients; a norm that is known already is not measured."""
    _, given = _read(rule, grads, state, params, all_reduce, loss=loss)
    with given.backend.quiet(given.first):
        decision = decide(rule, given, state, params, all_reduce, norm, loss)
        return decision.state, decision.report()


def clip_known(rule: Rule, grads: Any, norm: Any, *, in_place: bool = False) -> tuple[Any, Any]:
    """Clip by a rule that remembers nothing; return the gradients and their norms, ``norm`` if it is known already."""
    given = read(grads, rule.scope, in_place=in_place)
    with given.backend.quiet(given.first):
        decision = decide(rule, given, _NO_STATE, norm=norm)
        return decision.clipped(rule), decision.arranged_norms()


def norm_of(grads: Any, scope: Scope, norm: Norm) -> Any:
    """Return the norms of the gradients, without clipping."""
    given = read(grads, scope)
    with given.backend.quiet(given.first):
        return given.arrange(given.as_arrays(measure(given, norm)))


def apply(
    grads: Any, prepare: Callable[[Backend, Any], tuple[Any, ...]], *, in_place: bool = False
) -> tuple[Any, Report]:
    """Replace each gradient array (a sparse one's stored values) by a function of it.

    ``prepare(backend, array)`` returns the function, of the array entry by entry and of operands that
    broadcast against it, and the operands.
    """
    backend, tree = flatten_grads(grads, in_place=flag("in_place", in_place))
    given = Gradients(backend, each_leaf, {}, tree, in_place=in_place)
    with backend.quiet(given.first):
        leaves = [Leaf(number, leaf, *backend.stored(leaf), None) for number, leaf in enumerate(tree.leaves)]
        ready = [(leaf, _named(tree, leaf, prepare, backend, leaf.array)) for leaf in leaves]
        return tree.rebuild([_named(tree, leaf, given.put, leaf, *change) for leaf, change in ready]), Report()


def _named(tree: Tree, leaf: Leaf, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; name the leaf where it finds fault."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        if type(error) not in {TypeError, ValueError}:
            raise  # a framework's own error explains itself, and may not be made from a message
        msg = f"{tree.place(leaf.number)}: {error}"
        raise type(error)(msg) from error
