# SPDX-License-Identifier: MIT
"""Clipping inside TensorFlow 1 optimizers: a wrapper whose ``apply_gradients`` clips first.

Not for the optimizers of Keras, which have `uniclip.integrations.keras`.
"""

from __future__ import annotations

from uniclip._errors import needs

with needs("TensorFlow", "tensorflow"):
    import tensorflow as tf

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import optree

from uniclip._errors import LIMIT, check, nonnegative, summarize
from uniclip._types import Number, State
from uniclip.compose import AnyRule
from uniclip.integrations import rule_for_steps
from uniclip.presets.fixed import by_global_norm
from uniclip.report import Report
from uniclip.rule import BaseRule
from uniclip.saved import from_dict, names_in_state, to_dict

__all__ = ["ClippedOptimizer", "clip_gradients_by_norm"]

tf1 = tf.compat.v1

if TYPE_CHECKING:
    Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
    GradientAndVariable: TypeAlias = tuple[Gradient, tf.Variable]


def clip_gradients_by_norm(
    optimizer: tf.compat.v1.train.Optimizer, clip_norm: Number
) -> ClippedOptimizer:
    """Return an optimizer that clips by the global norm, as in ``tf.contrib.estimator``.

    Despite its name, the function does not clip each gradient by its own norm: it multiplies all
    gradients by ``min(1, clip_norm / ‖all gradients‖₂)``. To clip each gradient by its own norm,
    use `ClippedOptimizer` with the rule `uniclip.by_norm`.

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
    limit = nonnegative("clip_norm", clip_norm, LIMIT)
    return ClippedOptimizer(optimizer, by_global_norm(limit))


class ClippedOptimizer(tf.compat.v1.train.Optimizer):
    """Wrap a TensorFlow 1 optimizer: ``apply_gradients`` clips all gradients by a rule first.

    ``compute_gradients`` returns unclipped gradients, so that you can change them before they are
    clipped. The wrapper works in sessions, in eager code and in ``tf.function``, on resource
    variables and reference variables.

    Parameters
    ----------
    optimizer : tf.compat.v1.train.Optimizer
        The optimizer that takes the steps. It keeps its name, its slots and the names of its
        variables.
    rule : Rule or callable
        The path of a gradient is ``(name,)`` with the name of its variable: ``("rnn/kernel",)``.
        Each array in the state of a stateful rule is a variable, which is saved with the others and
        updated by the train op.

    Attributes
    ----------
    rule : Rule
    report : Report or None
        The report of the train op built last, in tensors of its graph: run them with the train op.
        In eager code, the report of the last step. ``None`` before the first.
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
    `uniclip.curves.reject`, changes nothing: variables, slots and ``global_step`` stay as they are.

    All train ops that one optimizer builds in a graph share one state. ``get_slot`` and
    ``get_slot_names`` return the slots of the wrapped optimizer; ``variables`` returns its
    variables and those of the state.

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

        # The wrapper shares the name, the slots and the other variables of the optimizer, and the
        # values that a checkpoint restores later.
        optimizer._maybe_initialize_trackable()  # noqa: SLF001
        self.__dict__.update(vars(optimizer))

        self.rule = rule_for_steps(rule)
        self.loss: Number | None = None
        self._wrapped = optimizer
        self._rule_states: dict[tf.Graph | None, _RuleState] = {}

    def __repr__(self) -> str:
        """Return the rule, and the wrapped optimizer."""
        return f"<ClippedOptimizer: {self.rule!r}, {type(self._wrapped).__name__}>"

    def minimize(
        self, loss: tf.Tensor | Callable[[], tf.Tensor], *args: Any, **kwargs: Any
    ) -> tf.Operation | None:
        """Compute the gradients of ``loss``, clip and apply them.

        See ``tf.compat.v1.train.Optimizer``.
        """
        # The rule may use the loss, which `apply_gradients` does not get.
        if not callable(loss):
            self.loss = loss
            return super().minimize(loss, *args, **kwargs)

        def compute_loss() -> tf.Tensor:
            self.loss = loss()
            return self.loss

        return super().minimize(compute_loss, *args, **kwargs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[GradientAndVariable]:
        """Return the pairs of an unclipped gradient and its variable.

        See ``tf.compat.v1.train.Optimizer``.
        """
        pairs: list[GradientAndVariable] = self._wrapped.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(
        self,
        grads_and_vars: Iterable[GradientAndVariable],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Clip the gradients and apply them; see ``tf.compat.v1.train.Optimizer``.

        Parameters
        ----------
        grads_and_vars : iterable of pairs
            Gradients (dense, ``IndexedSlices`` or ``None``) and their variables, not clipped.
        global_step : variable, optional
            Counts the steps that are not skipped.
        name : str, optional
            The name of the operation.

        Returns
        -------
        tf.Operation
            The train op, which clips, applies, and updates the state of the rule; ``None`` in eager
            code.

        Raises
        ------
        TypeError, ValueError
            As the wrapped optimizer, and as `uniclip.Rule.update`; if a variable occurs twice; if a
            variable is not among those of the first step, for a rule with state for each leaf; or
            under a strategy of ``tf.distribute``.
        """
        _check_strategy()
        pairs = list(grads_and_vars)
        # A loss that outlived a failed step would be used for another one.
        loss = self.loss
        self.loss = None
        if loss is not None:
            # The gradients of a loss for each example are those of the sum.
            loss = tf.reduce_sum(loss)

        variables = [variable for _, variable in pairs]
        rule_state = self._rule_state(variables)
        params = _name_variables(variables, rule_state.params)

        # Variables of the first step without a gradient in this one keep their state.
        grads: dict[str, Gradient] = dict.fromkeys(rule_state.params)
        for key, (grad, _) in zip(params, pairs, strict=True):
            grads[key] = None
            if grad is not None:
                grads[key] = tf1.convert_to_tensor_or_indexed_slices(grad)

        old_state = rule_state.read()
        clipped, new_state, self.report = self.rule.update(
            grads, old_state, rule_state.params | params, loss=loss
        )

        pairs = [(clipped[key], variable) for key, variable in params.items()]
        # Without this edge, a session that runs only the train op would not update the state.
        with tf.control_dependencies(rule_state.assign(new_state, old_state)):
            if self.report.skipped is None:
                return self._wrapped.apply_gradients(pairs, global_step, name)
            return self._apply_unless(self.report.skipped, pairs, global_step, name)

    def _apply_unless(
        self,
        skipped: tf.Tensor,
        pairs: list[GradientAndVariable],
        global_step: tf.Variable | None,
        name: str | None,
    ) -> tf.Operation | None:
        """Let the wrapped optimizer take the step, unless the rule skips it."""
        # Slots created in a branch would get the branch's name as a prefix.
        with tf.init_scope():
            with_gradient = [variable for grad, variable in pairs if grad is not None]
            self._wrapped._create_slots(with_gradient)  # noqa: SLF001

        train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
        earlier_ops = list(train_ops)
        applied = tf.cond(
            skipped,
            tf.no_op,
            lambda: tf.group(self._wrapped.apply_gradients(pairs, global_step, name)),
        )
        # Eager code has taken the step by now, and has no train op to return.
        if tf.executing_eagerly():
            return None

        # The wrapped optimizer has added the train op in the branch, which cannot be run.
        train_op = tf.group(applied, name=name or self._name)
        train_ops[:] = [*earlier_ops, train_op]
        return train_op

    def _rule_state(self, variables: list[tf.Variable]) -> _RuleState:
        """Return the state of the rule in this graph, which the first step creates."""
        # Operations cannot use variables of another graph, so each graph has a separate state.
        graph = _outermost_graph()
        if graph in self._rule_states:
            return self._rule_states[graph]

        # Without state there is nothing to keep for a variable.
        params = _name_variables(variables, {}) if self.rule.stateful else {}
        first = self.rule.init(_zeros_like(params))
        names = [f"{self._name}/clip/{name or 'state'}" for name in names_in_state(first)]

        # The scope creates the variables outside `tf.function` and `tf.cond`.
        with tf.init_scope(), tf.variable_creator_scope(_create_resource_variable):
            state_variables = [
                self._create_non_slot_variable(array, name, variables[0])
                for array, name in zip(optree.tree_leaves(first), names, strict=True)
            ]
        self._rule_states[graph] = _RuleState(params, first, state_variables)
        return self._rule_states[graph]

    def rule_state_dict(self, session: tf.compat.v1.Session | None = None) -> dict[str, Any]:
        """Return the rule's state as plain numbers, in the format of `uniclip.Clipper.state_dict`.

        Parameters
        ----------
        session : tf.compat.v1.Session, optional
            In a graph, the session with the values; by default the current session.

        Returns
        -------
        dict
            Without slots and other variables. Empty before the first ``minimize`` or
            ``apply_gradients``, which create the variables, and for a rule without state.

        Raises
        ------
        ValueError
            In a graph, if there is no session.
        """
        session = _session_or_eager(session)
        rule_state = self._find_rule_state(session)
        if rule_state is None:
            return {}

        if session is None:
            values = [variable.numpy() for variable in rule_state.variables]
        else:
            values = session.run(rule_state.variables)
        return to_dict(self.rule, rule_state.unflatten(values), _zeros_like(rule_state.params))

    def load_rule_state_dict(
        self, saved: dict[str, Any], session: tf.compat.v1.Session | None = None
    ) -> None:
        """Restore a rule's state that was saved by any integration, in any framework.

        Parameters
        ----------
        saved : dict
            The saved state; an empty dict starts with empty state.
        session : tf.compat.v1.Session, optional
            In a graph, the session to set, after the variables are initialized; by default the
            current session.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            Before the first ``minimize`` or ``apply_gradients``, or if the rule has no state; if
            ``saved`` belongs to another rule or other variables; in a graph, if there is no
            session.
        """
        session = _session_or_eager(session)
        rule_state = self._find_rule_state(session)
        if rule_state is None or not rule_state.variables:
            msg = (
                "the rule has no variables (yet); call load_rule_state_dict after minimize or "
                "apply_gradients"
            )
            raise ValueError(msg)

        state = from_dict(self.rule, saved, _zeros_like(rule_state.params))
        for variable, array in zip(rule_state.variables, optree.tree_leaves(state), strict=True):
            if session is None:
                variable.assign(array)
            else:
                # The graph may be finalized, so that a new operation would fail.
                session.run(variable.initializer, {variable.initializer.inputs[1]: array})

    def _find_rule_state(self, session: tf.compat.v1.Session | None) -> _RuleState | None:
        """Return the state of the rule in the graph of a session, if there is one yet."""
        graph = _outermost_graph() if session is None else session.graph
        return self._rule_states.get(graph)

    def scalars(self) -> dict[str, tf.Tensor]:
        """Return the scalars for a logger such as ``tf.compat.v1.summary.scalar``.

        See `uniclip.Report.scalars`.

        Returns
        -------
        dict of str to 0-d tensor
            ``"clip/norm"`` (before clipping), ``"clip/limit"``, ``"clip/threshold"`` for rules that
            have one, ``"clip/factor"``, ``"clip/share"`` and, for a rule that may skip a step,
            ``"clip/skipped"``. Run them with the train op to get the scalars of the same step.
            Scalars of a ``tf.function``, or of a branch of a ``tf.cond``, are valid only inside it.

        Raises
        ------
        ValueError
            Before the first ``minimize`` or ``apply_gradients``.
        """
        if self.report is None:
            msg = "there is no report yet; call scalars() after minimize() or apply_gradients()"
            raise ValueError(msg)
        return self.report.scalars()


class _RuleState(NamedTuple):
    """The state of a rule in a graph."""

    params: dict[str, tf.Variable]
    """The parameters of the first step, by name."""
    first: Any
    """The state before the first step, in NumPy arrays."""
    variables: list[tf.Variable]
    """A variable for each array of the state."""

    def unflatten(self, arrays: Sequence[object]) -> State:
        """Return the state with these arrays."""
        structure = optree.tree_structure(self.first)
        return cast("State", optree.tree_unflatten(structure, arrays))

    def read(self) -> State:
        """Return the state in tensors."""
        return self.unflatten([variable.read_value() for variable in self.variables])

    def assign(self, new: Any, old: Any) -> list[tf.Operation]:
        """Return the operations that assign a new state, after the old one is read."""
        tensors = zip(self.variables, optree.tree_leaves(new), strict=True)
        # In a graph, operations without such an edge run in any order.
        with tf.control_dependencies(optree.tree_leaves(old)):
            return [variable.assign(tensor, read_value=False) for variable, tensor in tensors]


def _session_or_eager(session: tf.compat.v1.Session | None) -> tf.compat.v1.Session | None:
    """Return a session or the current one, ``None`` in eager code; raise if a graph has none."""
    if session is None:
        session = tf1.get_default_session()
    if session is None and not tf.executing_eagerly():
        msg = (
            "in a graph, the values are in a session; pass session=, or call this inside `with "
            "session.as_default():`"
        )
        raise ValueError(msg)
    return session


def _outermost_graph() -> tf.Graph | None:
    """Return the graph in which variables are created, ``None`` in eager code."""
    with tf.init_scope():
        # In eager code, each thread has its own default graph.
        if tf.executing_eagerly():
            return None
        return tf1.get_default_graph()


def _create_resource_variable(
    next_creator: Callable[..., tf.Variable], **options: Any
) -> tf.Variable:
    """Create a resource variable: a value that was read stays, even if another one is assigned."""
    return next_creator(**options | {"use_resource": True})


def _name_variables(
    variables: list[tf.Variable], named_before: dict[str, tf.Variable]
) -> dict[str, tf.Variable]:
    """Return variables by name, with their earlier names; raise if a variable occurs twice."""
    by_name = dict(named_before)
    # Variables compare element by element, so look for the objects.
    names = {id(variable): name for name, variable in named_before.items()}

    named: dict[str, tf.Variable] = {}
    for variable in variables:
        # Eager variables may share a name, and get numbers as in a graph.
        if id(variable) not in names:
            name = _unused_name(variable.name.split(":")[0], by_name)
            by_name[name] = variable
            names[id(variable)] = name

        name = names[id(variable)]
        if name in named:
            msg = f"{name} occurs twice in grads_and_vars; pass the sum of its gradients once"
            raise ValueError(msg)
        named[name] = variable
    return named


def _unused_name(name: str, used: dict[str, tf.Variable]) -> str:
    """Return a name, with a number if it is in use."""
    unused = name
    number = 1
    while unused in used:
        unused = f"{name}_{number}"
        number += 1
    return unused


def _zeros_like(params: dict[str, tf.Variable]) -> dict[str, np.ndarray[Any, Any]]:
    """Return NumPy arrays of zeros, which take no memory, like the parameters."""
    zeros = {}
    for name, variable in params.items():
        zero = np.zeros((), variable.dtype.as_numpy_dtype)
        zeros[name] = np.broadcast_to(zero, tuple(variable.shape))
    return zeros


def _check_optimizer(optimizer: object) -> None:
    """Raise if an optimizer cannot be wrapped."""
    expected = (
        "a tf.compat.v1.train.Optimizer (for Keras optimizers, use uniclip.integrations.keras)"
    )
    check("optimizer", optimizer, isinstance(optimizer, tf1.train.Optimizer), expected)

    loss_scaling = tf1.mixed_precision.MixedPrecisionLossScaleOptimizer
    if isinstance(optimizer, (ClippedOptimizer, loss_scaling)):
        msg = (
            f"optimizer is {summarize(optimizer)}; wrap the optimizer inside it. uc.chain(a, b) "
            "combines two rules, and a loss scale goes outside: "
            "MixedPrecisionLossScaleOptimizer(ClippedOptimizer(optimizer, rule), loss_scale)"
        )
        raise ValueError(msg)  # noqa: TRY004 - the type is right


def _check_strategy() -> None:
    """Raise under a strategy of ``tf.distribute``, whose replicas have partial gradients."""
    if tf.distribute.has_strategy():
        msg = (
            "ClippedOptimizer for TensorFlow 1 doesn't support "
            f"{type(tf.distribute.get_strategy()).__name__}; use a Keras optimizer with "
            "uniclip.integrations.keras, or sum the gradients of all replicas and clip the sum "
            "with uc.clip"
        )
        raise ValueError(msg)
