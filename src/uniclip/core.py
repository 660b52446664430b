# SPDX-License-Identifier: MIT
"""What is done to a tree of gradients: it is clipped or measured by a rule, or replaced array by array."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip.backends import backend_of
from uniclip.decide import Report, decide
from uniclip.gradients import Gradients, Leaf, read
from uniclip.limits import NoState
from uniclip.measure import AllReduce, measure, same_shape
from uniclip.scopes import each_leaf
from uniclip.tree import Tree, describe, flatten_grads

if TYPE_CHECKING:
    from uniclip.backends import Backend
    from uniclip.norms import Norm
    from uniclip.rules import Rule
    from uniclip.scopes import Scope


_NO_STATE = NoState()


def clip(grads: Any, rule: Any, params: Any = None, all_reduce: AllReduce | None = None) -> tuple[Any, Report]:
    """Clip gradients by a rule that remembers nothing, or by a function of one gradient array.

    Parameters
    ----------
    grads : array or tree of arrays
        Of one framework. ``None`` leaves are absent gradients and keep their place.
    rule : Rule, ByValue, or callable
        A callable gets one gradient array and returns the array to put in its place.
    params : tree, optional
        The parameters, for limits that compare with them; a tree of the same paths as ``grads``.
    all_reduce : callable, optional
        ``all_reduce(array, op)`` joins partial norms across devices; ``op`` is ``"sum"`` or ``"max"``.

    Returns
    -------
    clipped : tree
        Like ``grads``: every leaf keeps its dtype, shape, device and sparsity (integers become the
        framework's default float under a rule that measures norms).
    report : Report

    Raises
    ------
    TypeError
        If a leaf is no array, leaves belong to two frameworks, a function returns no array, or
        ``rule`` is neither a rule nor a function.
    ValueError
        If the rule remembers earlier steps, a limit is negative or NaN, or an iterator is spent.
    FloatingPointError
        If the rule's policy for gradients that are not finite is ``"raise"``, and they are not.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> clipped, report = uc.clip(grads, uc.by_global_norm(6.5))
    >>> clipped
    [array([1.5, 2. ]), array([6.])]
    >>> float(report.norms), float(report.factors)
    (13.0, 0.5)
    >>> uc.clip(np.asarray([3.0, -4.0]), np.sign)[0]
    array([ 1., -1.])
    """
    return _clip(grads, rule, params, all_reduce, in_place=False)


def clip_(grads: Any, rule: Any, params: Any = None, all_reduce: AllReduce | None = None) -> Report:
    """Clip gradients in place, piece by piece: no second set of gradients is made.

    Parameters
    ----------
    grads, rule, params, all_reduce
        As in `clip`; of a framework whose arrays can be changed. An array that is given twice is
        one gradient: it counts once and is scaled once.

    Returns
    -------
    report : Report

    Raises
    ------
    TypeError
        As `clip`; and if an array cannot be changed: its framework allows none, it is read-only, or holds
        several entries in one place; or if it holds integers and the rule measures norms.
    ValueError
        As `clip`; and if two arrays overlap.
    FloatingPointError
        As `clip`. After any error of uniclip's no array is changed.

    Notes
    -----
    A function of an array, the scope `each_entry`, and tensors that record derivatives need memory of
    the array's own size.

    Examples
    --------
    >>> grads = [np.asarray([3.0, 4.0]), np.asarray([12.0])]
    >>> report = uc.clip_(grads, uc.by_global_norm(6.5))
    >>> grads, float(report.norms)
    ([array([1.5, 2. ]), array([6.])], 13.0)
    """
    return _clip(grads, rule, params, all_reduce, in_place=True)[1]


def clip_and_sum(grads: Any, rule: Rule, params: Any = None, all_reduce: AllReduce | None = None) -> tuple[Any, Report]:
    """Clip the gradients of single examples and add them up, without keeping the clipped ones.

    Parameters
    ----------
    grads : array or tree of arrays
        The examples along the first axis of every leaf, as ``jax.vmap(jax.grad(loss), (None, 0))`` and
        ``torch.func.vmap(torch.func.grad(loss), (None, 0))`` return them.
    rule : Rule
        One that remembers nothing, such as `uniclip.by_example_norm`.
    params, all_reduce
        As in `clip`.

    Returns
    -------
    total : tree
        Like ``grads``, without the first axis; added in float32 or wider.
    report : Report

    Raises
    ------
    TypeError
        As `clip`; and if ``rule`` measures no norms.
    ValueError
        As `clip`; and if leaves have no first axis or differ in its length.

    Examples
    --------
    >>> grads = [np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[12.0], [0.0]])]
    >>> uc.clip_and_sum(grads, uc.by_example_norm(6.5))[0]
    [array([1.8, 2.4]), array([6.])]
    """
    return _clip_and_reduce(grads, rule, params, all_reduce, mean=False)


def clip_and_mean(
    grads: Any, rule: Rule, params: Any = None, all_reduce: AllReduce | None = None
) -> tuple[Any, Report]:
    """Clip the gradients of single examples and take their mean: `clip_and_sum` divided by their number.

    Parameters
    ----------
    grads, rule, params, all_reduce
        As in `clip_and_sum`.

    Returns
    -------
    mean : tree
        Like ``grads``, without the first axis.
    report : Report

    Raises
    ------
    TypeError, ValueError
        As `clip_and_sum`.

    Notes
    -----
    With differential privacy and batches of random size, divide the sum by the expected size instead.

    Examples
    --------
    >>> grads = [np.asarray([[3.0, 4.0], [0.3, 0.4]]), np.asarray([[12.0], [0.0]])]
    >>> uc.clip_and_mean(grads, uc.by_example_norm(6.5))[0]
    [array([0.9, 1.2]), array([3.])]
    """
    return _clip_and_reduce(grads, rule, params, all_reduce, mean=True)


def _clip_and_reduce(
    grads: Any, rule: Any, params: Any, all_reduce: AllReduce | None, *, mean: bool
) -> tuple[Any, Report]:
    if not hasattr(rule, "measure"):
        msg = f"rule must be one of norms, such as uc.by_example_norm(1.0), got {rule!r}"
        raise TypeError(msg)
    _refuse_memory(rule, "clipped, state, report = rule.update(grads, state), and add up what is clipped")
    given = read(grads, rule.scope)
    with given.backend.quiet():
        decision = decide(rule, given, _NO_STATE, params, all_reduce)
        return decision.reduced(rule, mean=mean), decision.report()


def _refuse_memory(rule: Any, update: str) -> None:
    if rule.memory:
        msg = f"{rule!r} remembers earlier steps: use state = rule.init(grads), then {update}; or a uc.Clipper(rule)"
        raise ValueError(msg)


def _clip(grads: Any, rule: Any, params: Any, all_reduce: AllReduce | None, *, in_place: bool) -> tuple[Any, Report]:
    if isinstance(rule, type) or not (callable(rule) or hasattr(rule, "memory")):
        msg = f"rule must be a rule, such as uc.by_global_norm(1.0), or a function of one array, got {rule!r}"
        raise TypeError(msg)
    if not hasattr(rule, "memory"):
        return apply_function(grads, rule, in_place=in_place)
    _refuse_memory(rule, f"clipped, state, report = rule.update(grads, state{', in_place=True' if in_place else ''})")
    clipped, _, report = rule.update(grads, _NO_STATE, params, all_reduce, in_place=in_place)
    return clipped, report


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
        hint = f"; call it first, as {function.__name__}(1.0)" if hasattr(result, "update") else ""
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
    given = read(grads, rule.scope, in_place=in_place)
    with given.backend.quiet():
        decision = decide(rule, given, state, params, all_reduce, loss=loss)
        return decision.clipped(rule), decision.state, decision.report()


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
    given = read(grads, rule.scope)
    with given.backend.quiet():
        decision = decide(rule, given, state, params, all_reduce, norm, loss)
        return decision.state, decision.report()


def clip_known(rule: Rule, grads: Any, norm: Any) -> tuple[Any, Any]:
    """Clip by a rule that remembers nothing; return the gradients and their norms, ``norm`` if it is known already."""
    given = read(grads, rule.scope)
    with given.backend.quiet():
        decision = decide(rule, given, _NO_STATE, norm=norm)
        return decision.clipped(rule), decision.arranged_norms()


def norm_of(grads: Any, scope: Scope, norm: Norm) -> Any:
    """Return the norms of the gradients, without clipping."""
    given = read(grads, scope)
    with given.backend.quiet():
        return given.arrange(given.as_arrays(measure(given, norm)))


def apply(
    grads: Any, prepare: Callable[[Backend, Any], tuple[Any, ...]], *, in_place: bool = False
) -> tuple[Any, Report]:
    """Replace each gradient array (a sparse one's stored values) by a function of it.

    ``prepare(backend, array)`` returns the function, of the array entry by entry and of operands that
    broadcast against it, and the operands.
    """
    backend, tree = flatten_grads(grads, in_place=in_place)
    given = Gradients(backend, each_leaf, {}, tree, in_place=in_place)
    with backend.quiet():
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
