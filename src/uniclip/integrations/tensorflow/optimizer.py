# SPDX-License-Identifier: MIT
"""An optimizer that wraps another one."""
# ruff: noqa: SLF001 - an optimizer around another one hands on what TensorFlow asks of it in private

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import optree
import tensorflow as tf

from uniclip._errors import LIMIT, check, nonnegative, short
from uniclip._types import Number
from uniclip.arraywise import AnyRule
from uniclip.integrations import rule_for_steps
from uniclip.integrations.tensorflow.checks import (
    refuse_optimizer,
    refuse_others,
    refuse_references,
    refuse_strategy,
)
from uniclip.integrations.tensorflow.variables import (
    Rows,
    first_state,
    names_of,
    outermost_graph,
    session_of,
    set_values,
    values_of,
)
from uniclip.labels import leaves_of
from uniclip.presets.fixed import by_global_norm
from uniclip.report import Report
from uniclip.rules import BaseRule
from uniclip.saved import from_saved, restored, to_saved
from uniclip.tree import flatten

tf1 = tf.compat.v1
_BEGIN = "start over with load_rule_state_dict({})"


def clip_gradients_by_norm(optimizer: tf.compat.v1.train.Optimizer, clip_norm: Number) -> ClippedOptimizer:
    """Return an optimizer that clips by the global norm, as ``tf.contrib.estimator``'s function of this name did.

    Despite its name it does not clip each gradient by its own norm: it multiplies all gradients by
    ``min(1, clip_norm / ‖all gradients‖₂)``. To clip each by its own norm, use `ClippedOptimizer` with the rule
    `uniclip.by_norm`.

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
    """Wrap a TensorFlow 1 optimizer: ``apply_gradients`` clips all gradients by a rule before it applies them.

    ``compute_gradients`` returns unclipped gradients, so that gradients changed in between are clipped once, and last.
    It works in sessions, eagerly and in ``tf.function``, on resource variables and reference variables.

    Parameters
    ----------
    optimizer : tf.compat.v1.train.Optimizer
        The optimizer that takes the steps. It keeps its name, its slots and the names of its variables.
    rule : Rule or callable
        The path of a gradient is ``(name,)`` with the name of its variable: ``("rnn/kernel",)``. The state of a rule
        with memory is in variables that are saved with the others, and updated by the train op.

    Attributes
    ----------
    rule : Rule
    report : Report or None
        The report of the train op built last, in tensors of its graph: run them with the train op. In eager code the
        report of the last step. ``None`` before.
    loss : 0-d array or None
        The loss of the next ``apply_gradients``, for rules that use it. ``minimize`` sets it; ``None`` after the
        step.

    Raises
    ------
    TypeError
        If ``optimizer`` is not a TensorFlow 1 optimizer, or ``rule`` not a rule.
    ValueError
        If ``optimizer`` is already clipped, or scales the loss.

    Notes
    -----
    A step that the rule skips, by the policy ``nonfinite="skip"`` or the curve `uniclip.curves.reject`, is not
    taken: variables, slots and ``global_step`` stay as they are.

    All train ops that one optimizer builds in a graph share one state.

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
        if isinstance(optimizer, ClippedOptimizer):
            clipped = f"this optimizer is clipped already, by {short(optimizer.rule)}"
            msg = f"{clipped}: wrap it once, by uc.chain for two rules"
            raise ValueError(msg)  # noqa: TRY004 - the type is right
        refuse_optimizer(optimizer)
        self.rule = rule_for_steps(rule)
        self._optimizer = optimizer
        self._inside: Any = None
        self.loss: Number | None = None
        self._memories: dict[Any, tuple[dict[str, Any], Rows, list[Any]]] = {}
        optimizer._maybe_initialize_trackable()
        super().__init__(optimizer._use_locking, optimizer.get_name())

    def __repr__(self) -> str:
        """Return the rule, and the wrapped optimizer."""
        return f"<ClippedOptimizer: {self.rule!r}, {type(self._optimizer).__name__}>"

    def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of ``loss``, clip and apply them; see ``tf.compat.v1.train.Optimizer``."""
        if not callable(loss):
            self.loss = loss
            return super().minimize(loss, *args, **kwargs)

        def seen() -> Any:
            self.loss = loss()
            return self.loss

        return super().minimize(seen, *args, **kwargs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the pairs of an unclipped gradient and its variable, as the wrapped optimizer does."""
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
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
            As the wrapped optimizer, and as `uniclip.Rule.update`; if a variable occurs twice; if a variable is not
            among those of the first step, for a rule with memory of each leaf or group; or under a strategy of
            ``tf.distribute``.
        """
        refuse_strategy()
        pairs, loss, self.loss = list(grads_and_vars), self.loss, None
        if all(grad is None for grad, _ in pairs):
            return self._optimizer.apply_gradients(pairs, global_step, name)  # it has an error for it
        loss = None if loss is None else tf.reduce_sum(loss)  # as the gradients are
        names = names_of([variable for _, variable in pairs])
        params = dict(zip(names, [variable for _, variable in pairs], strict=True))
        known, state, rows, memory = self._memory(params)
        params = {**known, **params}
        grads = dict.fromkeys(params) | {
            n: None if g is None else tf1.convert_to_tensor_or_indexed_slices(g)
            for n, (g, _) in zip(names, pairs, strict=True)
        }
        clipped, state, self.report = self.rule.update(grads, state, params, loss=loss)
        graph = tf1.get_default_graph()
        self._inside = graph if graph.building_function else None
        # A variable that is not a resource must not change while its old value is still in use.
        done: Any = (clipped, self.report)
        with tf.control_dependencies(optree.tree_leaves(done) if memory else []):
            changed = [
                variable.assign(value, read_value=False)
                for variable, value in zip(memory, rows.parts(state) if rows else [], strict=True)
            ]
        with tf.control_dependencies(changed):
            pairs = [(clipped[n], v) for n, (_, v) in zip(names, pairs, strict=True)]
            if self.report.skipped is None:
                return self._optimizer.apply_gradients(pairs, global_step, name)
            return self._apply_unless(self.report.skipped, pairs, global_step, name)

    def _apply_unless(self, skipped: Any, pairs: list[tuple[Any, Any]], global_step: Any, name: str | None) -> Any:
        """Let the wrapped optimizer take the step, unless the rule skips it."""
        variables = [v for g, v in pairs if g is not None]
        refuse_references(variables)
        with tf.init_scope():  # in the branch their names would begin with its name
            self._optimizer._create_slots(variables)
        train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
        others = list(train_ops)
        taken = tf.cond(skipped, tf.no_op, lambda: tf.group(self._optimizer.apply_gradients(pairs, global_step, name)))
        if tf.executing_eagerly():
            return None
        train_op = tf.group(taken, name=name or self._name)
        train_ops[:] = [*others, train_op]  # not the one in the branch, which cannot be run
        return train_op

    def _memory(self, params: dict[str, Any]) -> tuple[dict[str, Any], Any, Rows | None, list[Any]]:
        """Return the variables that the state is of, the state, its layout and its variables; made once in a graph."""
        if not self.rule.memory:
            return {}, self.rule.init(params), None, []
        graph = outermost_graph()
        if graph not in self._memories:
            self._memories[graph] = self._remember(params)
        known, rows, memory = self._memories[graph]
        refuse_others(self.rule, known, params)
        return known, rows.stacked([tf.convert_to_tensor(variable) for variable in memory]), rows, memory

    def _remember(self, params: dict[str, Any]) -> tuple[dict[str, Any], Rows, list[Any]]:
        """Return the parameters, the variables of a new state for their gradients, and the layout of these."""
        names, values, rows = first_state(self.rule, params, self._name)
        first = next(iter(params.values()))
        with tf.init_scope():  # outside of tf.function and tf.cond
            memory = [self._create_non_slot_variable(v, n, first) for v, n in zip(values, names, strict=True)]
        return params, rows, memory

    def rule_state_dict(self, session: Any = None) -> dict[str, Any]:
        """Return the rule's memory as plain numbers and lists, in the format of `uniclip.Clipper.state_dict`.

        Parameters
        ----------
        session : tf.compat.v1.Session, optional
            In a graph, the session with the values; by default the one that was entered.

        Returns
        -------
        dict
            Without slots and other variables. Empty before the first ``minimize`` or ``apply_gradients``, which
            create the variables, and for a rule without memory.
        """
        session = session_of(session)
        found = self._memories.get(outermost_graph() if session is None else session.graph)
        if found is None:
            return {}
        params, rows, memory = found
        state = rows.stacked(values_of(memory, session), np.stack)
        return to_saved(self.rule, leaves_of(self.rule, flatten(params)), state)

    def load_rule_state_dict(self, saved: dict[str, Any], session: Any = None) -> None:
        """Restore a rule's memory that was saved by any integration, in any framework.

        Parameters
        ----------
        saved : dict
            An empty dict starts over.
        session : tf.compat.v1.Session, optional
            In a graph, the session to set, after the variables are initialized; by default the one that was entered.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            Before the first ``minimize`` or ``apply_gradients``, or if the rule has no memory; if it is that of
            another rule or of other variables.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        session = session_of(session)
        found = self._memories.get(outermost_graph() if session is None else session.graph)
        if found is None:
            msg = "the rule has no variables (yet): call load_rule_state_dict after minimize or apply_gradients"
            raise ValueError(msg)
        params, _, memory = found
        _, values, rows = first_state(self.rule, params, self._name)
        state = rows.stacked(values, np.stack)
        if saved:
            leaves = leaves_of(self.rule, flatten(params))
            state = restored(from_saved(saved, self.rule, _BEGIN), self.rule, leaves, state, _BEGIN)
        set_values(memory, rows.parts(state, lambda array, _: list(array)), session)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return the slot of a variable, as the wrapped optimizer does."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots of the wrapped optimizer."""
        names: list[str] = self._optimizer.get_slot_names()
        return names

    def variables(self) -> list[Any]:
        """Return the variables of the wrapped optimizer, and those that hold the state of the rule."""
        return [*self._optimizer.variables(), *super().variables()]

    # For tf.train.Checkpoint: that of this optimizer holds one of the wrapped optimizer, and the rule's state.

    def _trackable_children(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            **self._optimizer._trackable_children(*args, **kwargs),
            **super()._trackable_children(*args, **kwargs),
        }

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._lookup_dependency(*args, **kwargs)
        return self._optimizer._lookup_dependency(*args, **kwargs) if found is None else found

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer._create_or_restore_slot_variable(*args, **kwargs)

    @property
    def _deferred_dependencies(self) -> Any:
        return self._optimizer._deferred_dependencies

    def scalars(self) -> dict[str, Any]:
        """Return the scalars for a logger, ready for ``tf.compat.v1.summary.scalar``; see `uniclip.Report.scalars`.

        Returns
        -------
        dict of str to 0-d tensor
            ``"clip/norm"`` (before clipping), ``"clip/limit"``, ``"clip/threshold"`` for rules that have one,
            ``"clip/factor"``, ``"clip/share"`` and, for a rule that may skip a step, ``"clip/skipped"``. Run with the
            train op they belong to the same step.

        Raises
        ------
        ValueError
            Before the first ``minimize`` or ``apply_gradients``; and outside the ``tf.function``, or the branch of a
            ``tf.cond``, that called it.
        """
        if self.report is None:
            msg = "there is no report yet: call scalars() after minimize() or apply_gradients()"
            raise ValueError(msg)
        if self._inside is not None and self._inside is not tf1.get_default_graph():
            msg = (
                "the gradients were applied inside of a tf.function or a branch of a tf.cond (a dynamic loss scale has "
                "one), and what is inside cannot be read outside: call scalars() inside and return them"
            )
            raise ValueError(msg)
        return self.report.scalars()
