# SPDX-License-Identifier: MIT
"""Clipping inside TensorFlow 1 optimizers: wrap one once,
and every ``apply_gradients`` clips first.
"""

from __future__ import annotations

from uniclip._errors import needs

with needs("TensorFlow", "tensorflow"):
    import tensorflow as tf

from collections import Counter
from collections.abc import Iterable
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import optree

from uniclip._errors import LIMIT, check, nonnegative, summarize
from uniclip._types import Number
from uniclip.compose import AnyRule
from uniclip.integrations import rule_for_steps
from uniclip.presets.fixed import by_global_norm
from uniclip.report import Report
from uniclip.rule import BaseRule
from uniclip.saved import from_dict, names_of, to_dict

__all__ = ["ClippedOptimizer", "clip_gradients_by_norm"]

tf1 = tf.compat.v1


def clip_gradients_by_norm(
    optimizer: tf.compat.v1.train.Optimizer, clip_norm: Number
) -> ClippedOptimizer:
    """Return an optimizer that clips by the global norm.

    ``tf.contrib.estimator`` had a function of this name that did.

    Despite its name it does not clip each gradient by its own norm: it multiplies all gradients by
    ``min(1, clip_norm / ‖all gradients‖₂)``. To clip each by its own norm, use `ClippedOptimizer`
    with the rule `uniclip.by_norm`.

    Parameters
    ----------
    optimizer : tf.compat.v1.train.Optimizer
    clip_norm : float or 0-d tensor

    Returns
    -------
    ClippedOptimizer
        ``ClippedOptimizer(optimizer, uc.by_global_norm(clip_norm))``.

    Raises
    ------
    TypeError, ValueError
        As `ClippedOptimizer`; and if ``clip_norm`` is not a number, negative or NaN.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from uniclip.integrations.tensorflow import clip_gradients_by_norm
    >>> w = tf.Variable([0.0, 0.0])
    >>> optimizer = clip_gradients_by_norm(tf.compat.v1.train.GradientDescentOptimizer(1.0), 5.0)
    >>> optimizer.minimize(lambda: tf.reduce_sum(w * [30.0, 40.0]))
    >>> w.numpy()
    array([-3., -4.], dtype=float32)
    """
    return ClippedOptimizer(optimizer, by_global_norm(nonnegative("clip_norm", clip_norm, LIMIT)))


class ClippedOptimizer(tf.compat.v1.train.Optimizer):
    """Wrap a TensorFlow 1 optimizer: ``apply_gradients`` clips all gradients by a rule first.

    ``compute_gradients`` returns unclipped gradients, so that gradients changed in between are
    clipped once, and last. It works in sessions, eagerly and in ``tf.function``, on resource
    variables and reference variables.

    Parameters
    ----------
    optimizer : tf.compat.v1.train.Optimizer
        The optimizer that takes the steps. It keeps its name, its slots and the names of its
        variables.
    rule : Rule or callable
        The path of a gradient is ``(name,)`` with the name of its variable: ``("rnn/kernel",)``.
        Each array in the state of a rule with memory is a variable that is saved with the others,
        and updated by the train op.

    Attributes
    ----------
    rule : Rule
    report : Report or None
        The report of the train op built last, in tensors of its graph: run them with the train op.
        In eager code the report of the last step. ``None`` before.
    loss : 0-d array or None
        The loss of the next ``apply_gradients``, for rules that use it. ``minimize`` sets it;
        ``None`` after the step.

    Raises
    ------
    TypeError
        If ``optimizer`` is not a TensorFlow 1 optimizer, or ``rule`` not a rule.
    ValueError
        If ``optimizer`` is already clipped, or scales the loss.

    Notes
    -----
    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve
    `uniclip.curves.reject`, is not taken: variables, slots and ``global_step`` stay as they are.

    All train ops that one optimizer builds in a graph share one state. ``get_slot`` and
    ``get_slot_names`` know the slots of the wrapped optimizer; ``variables`` returns its variables,
    and those of the state.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from uniclip.integrations.tensorflow import ClippedOptimizer
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     w = tf.compat.v1.get_variable("w", initializer=[0.0, 0.0])
    ...     optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    ...     optimizer = ClippedOptimizer(optimizer, uc.by_value(-0.5, 0.5))
    ...     train = optimizer.minimize(tf.reduce_sum(w * [0.1, -3.0]))
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     session.run(train)
    ...     print(session.run(w))
    [-0.1  0.5]
    """

    rule: BaseRule
    report: Report | None = None

    def __init__(self, optimizer: tf.compat.v1.train.Optimizer, rule: AnyRule) -> None:
        _check_optimizer(optimizer)
        optimizer._maybe_initialize_trackable()  # noqa: SLF001
        # Name, slots, other variables, and what checkpoints are to restore.
        self.__dict__.update(vars(optimizer))
        self.rule = rule_for_steps(rule)
        self.loss: Number | None = None
        self._wrapped = optimizer
        self._memories: dict[Any, _Memory] = {}

    def __repr__(self) -> str:
        """Return the rule, and the wrapped optimizer."""
        return f"<ClippedOptimizer: {self.rule!r}, {type(self._wrapped).__name__}>"

    def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of ``loss``, clip and apply them.

        See ``tf.compat.v1.train.Optimizer``.
        """
        if not callable(loss):
            self.loss = loss
            return super().minimize(loss, *args, **kwargs)

        def seen() -> Any:
            self.loss = loss()
            return self.loss

        return super().minimize(seen, *args, **kwargs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the pairs of an unclipped gradient and its variable,
        as the wrapped optimizer does.
        """
        pairs: list[tuple[Any, Any]] = self._wrapped.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Clip the gradients and apply them; see ``tf.compat.v1.train.Optimizer``.

        Parameters
        ----------
        grads_and_vars : iterable of pairs
            Gradients (dense, ``IndexedSlices`` or ``None``) and their variables, not clipped.
        global_step : variable, optional
            Counts the steps that are taken.
        name : str, optional
            The name of the operation.

        Returns
        -------
        tf.Operation
            It clips, applies, and changes the state of the rule; ``None`` in eager code.

        Raises
        ------
        TypeError, ValueError
            As the wrapped optimizer, and as `uniclip.Rule.update`; if a variable occurs twice; if a
            variable is not among those of the first step, for a rule with memory of each leaf; or
            under a strategy of ``tf.distribute``.
        """
        _check_strategy()
        pairs, loss, self.loss = list(grads_and_vars), self.loss, None
        memory = self._memory([variable for _, variable in pairs])
        params = _named([variable for _, variable in pairs], memory.params)
        grads = dict.fromkeys(memory.params) | {
            name: None if grad is None else tf1.convert_to_tensor_or_indexed_slices(grad)
            for name, (grad, _) in zip(params, pairs, strict=True)
        }
        loss = None if loss is None else tf.reduce_sum(loss)  # as the gradients are
        state = memory.state([variable.read_value() for variable in memory.variables])
        clipped, new, self.report = self.rule.update(
            grads, state, memory.params | params, loss=loss
        )
        pairs = [(clipped[name], variable) for name, variable in params.items()]
        with tf.control_dependencies(memory.assign(new, state)):
            if self.report.skipped is None:
                return self._wrapped.apply_gradients(pairs, global_step, name)
            return self._apply_unless(self.report.skipped, pairs, global_step, name)

    def _apply_unless(
        self, skipped: Any, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None
    ) -> Any:
        """Let the wrapped optimizer take the step, unless the rule skips it."""
        with tf.init_scope():  # in the branch their names would begin with its name
            self._wrapped._create_slots([variable for grad, variable in pairs if grad is not None])  # noqa: SLF001
        train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
        others = list(train_ops)
        taken = tf.cond(
            skipped,
            tf.no_op,
            lambda: tf.group(self._wrapped.apply_gradients(pairs, global_step, name)),
        )
        if tf.executing_eagerly():
            return None
        train_op = tf.group(taken, name=name or self._name)
        train_ops[:] = [*others, train_op]  # not the one in the branch, which cannot be run
        return train_op

    def _memory(self, variables: list[Any]) -> _Memory:
        """Return the state of the rule; it is made at the first step in a graph."""
        graph = _outermost_graph()
        if graph not in self._memories:
            params = _named(variables, {}) if self.rule.stateful else {}
            first = self.rule.init(_zeros(params))
            names = [f"{self._name}/clip/{name or 'state'}" for name in names_of(first)]
            # Outside of tf.function and tf.cond.
            with tf.init_scope(), tf.variable_creator_scope(_as_resource):
                made = [
                    self._create_non_slot_variable(array, name, variables[0])
                    for array, name in zip(optree.tree_leaves(first), names, strict=True)
                ]
            self._memories[graph] = _Memory(params, first, made)
        return self._memories[graph]

    def rule_state_dict(self, session: Any = None) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists,
        in the format of `uniclip.Clipper.state_dict`.

        Parameters
        ----------
        session : tf.compat.v1.Session, optional
            In a graph, the session with the values; by default the one that was entered.

        Returns
        -------
        dict
            Without slots and other variables. Empty before the first ``minimize`` or
            ``apply_gradients``, which create the variables, and for a rule without memory.

        Raises
        ------
        ValueError
            In a graph, if there is no session.
        """
        memory, session = self._found(session)
        if memory is None:
            return {}
        made = memory.variables
        values = [variable.numpy() for variable in made] if session is None else session.run(made)
        return to_dict(self.rule, memory.state(values), _zeros(memory.params))

    def load_rule_state_dict(self, saved: dict[str, Any], session: Any = None) -> None:
        """Restore a rule's memory that was saved by any integration, in any framework.

        Parameters
        ----------
        saved : dict
            An empty dict starts over.
        session : tf.compat.v1.Session, optional
            In a graph, the session to set, after the variables are initialized; by default the one
            that was entered.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            Before the first ``minimize`` or ``apply_gradients``, or if the rule has no memory; if
            it is that of another rule or of other variables; in a graph, if there is no session.
        """
        memory, session = self._found(session)
        if memory is None or not memory.variables:
            msg = (
                "the rule has no variables (yet): call load_rule_state_dict after minimize or "
                "apply_gradients"
            )
            raise ValueError(msg)
        state = from_dict(self.rule, saved, _zeros(memory.params))
        for variable, value in zip(memory.variables, optree.tree_leaves(state), strict=True):
            if session is None:
                variable.assign(value)
            else:  # without a new operation, as the graph may be finalized
                session.run(variable.initializer, {variable.initializer.inputs[1]: value})

    def _found(self, session: Any) -> tuple[_Memory | None, Any]:
        """Return the state of the rule, and the session in which its values are;
        ``None`` in eager code.
        """
        session = tf1.get_default_session() if session is None else session
        if session is None and not tf.executing_eagerly():
            msg = (
                "the values are in a session: pass it, session=..., or enter it, `with "
                "session.as_default():`"
            )
            raise ValueError(msg)
        return self._memories.get(_outermost_graph() if session is None else session.graph), session

    def scalars(self) -> dict[str, Any]:
        """Return the scalars for a logger, ready for ``tf.compat.v1.summary.scalar``.

        See `uniclip.Report.scalars`.

        Returns
        -------
        dict of str to 0-d tensor
            ``"clip/norm"`` (before clipping), ``"clip/limit"``, ``"clip/threshold"`` for rules that
            have one, ``"clip/factor"``, ``"clip/share"`` and, for a rule that may skip a step,
            ``"clip/skipped"``. Run with the train op they belong to the same step. Inside of a
            ``tf.function``, or of the branch of a ``tf.cond``, they can be read inside only.

        Raises
        ------
        ValueError
            Before the first ``minimize`` or ``apply_gradients``.
        """
        if self.report is None:
            msg = "there is no report yet: call scalars() after minimize() or apply_gradients()"
            raise ValueError(msg)
        return self.report.scalars()


class _Memory(NamedTuple):
    """The state of a rule in a graph."""

    params: dict[str, Any]
    """The parameters that it is for."""
    first: Any
    """The state before the first step, in NumPy arrays."""
    variables: list[Any]
    """One for each of them."""

    def state(self, values: list[Any]) -> Any:
        """Return the state with these values of the variables."""
        return optree.tree_unflatten(optree.tree_structure(self.first), values)

    def assign(self, new: Any, old: Any) -> list[Any]:
        """Return the operations that assign a new state once the old one is read."""
        with tf.control_dependencies(optree.tree_leaves(old)):
            pairs = zip(self.variables, optree.tree_leaves(new), strict=True)
            return [variable.assign(value, read_value=False) for variable, value in pairs]


def _outermost_graph() -> Any:
    """Return the graph in which variables are created.

    ``None`` in eager code, where each thread would have another.
    """
    with tf.init_scope():
        return None if tf.executing_eagerly() else tf1.get_default_graph()


def _as_resource(make: Any, **options: Any) -> Any:
    """Make a resource variable, whose value stays as it was read when it is assigned."""
    return make(**options | {"use_resource": True})


def _named(variables: list[Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return variables by name; eager ones may share a name, and get numbers as in a graph."""
    named, names = dict(known), {id(variable): name for name, variable in known.items()}
    for variable in variables:
        if id(variable) not in names:
            name = variable.name.split(":")[0]
            numbered = (f"{name}_{number}" for number in count(1))
            name = next(one for one in chain([name], numbered) if one not in named)
            named[name], names[id(variable)] = variable, name
    found = [names[id(variable)] for variable in variables]
    twice = [name for name, times in Counter(found).items() if times > 1]
    if twice:
        msg = f"{twice[0]} occurs twice in grads_and_vars: give the sum of its gradients once"
        raise ValueError(msg)
    return {name: named[name] for name in found}


def _zeros(params: dict[str, Any]) -> dict[str, Any]:
    """Return NumPy arrays of the same shapes and dtypes, which take no memory."""
    return {
        n: np.broadcast_to(np.zeros((), v.dtype.as_numpy_dtype), tuple(v.shape))
        for n, v in params.items()
    }


def _check_optimizer(optimizer: Any) -> None:
    """Refuse optimizers that cannot be wrapped."""
    wanted = "a tf.compat.v1.train.Optimizer (for one of Keras there is uniclip.integrations.keras)"
    check("optimizer", optimizer, isinstance(optimizer, tf1.train.Optimizer), wanted)
    if isinstance(
        optimizer, (ClippedOptimizer, tf1.mixed_precision.MixedPrecisionLossScaleOptimizer)
    ):
        msg = (
            f"optimizer is {summarize(optimizer)}: wrap the one inside of it; uc.chain(a, b) makes "
            "one rule of two, and a loss scale goes outside, "
            "MixedPrecisionLossScaleOptimizer(ClippedOptimizer(optimizer, rule), loss_scale)"
        )
        raise ValueError(msg)  # noqa: TRY004 - the type is right


def _check_strategy() -> None:
    """Refuse a strategy of ``tf.distribute``, whose replicas have parts of the gradients."""
    if tf.distribute.has_strategy():
        msg = (
            "ClippedOptimizer of TensorFlow 1 is not for "
            f"{type(tf.distribute.get_strategy()).__name__}: use Keras' optimizers, "
            "uniclip.integrations.keras; or sum the gradients of all replicas and clip the sum "
            "by uc.clip"
        )
        raise ValueError(msg)
