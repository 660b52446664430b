# SPDX-License-Identifier: MIT
"""Record the steps of graphs: an operation in the train op passes their values to the recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import tensorflow as tf

from uniclip._repr import short
from uniclip.report import Parts, Report
from uniclip.tree import flatten

if TYPE_CHECKING:
    from uniclip.insight import Recorder


class Recording:
    """Passes the steps of one optimizer to a recorder.

    Parameters
    ----------
    record : Recorder
    rule : Rule
    """

    def __init__(self, record: Recorder, rule: Any) -> None:
        self._record, self._rule = record, rule
        self._names: list[str] | None = None

    def take(self, report: Report, loss: Any, leaves: Any, params: dict[str, Any], grads: dict[str, Any]) -> list[Any]:
        """Record a step, in a graph each time it is run: return the operations that do so.

        Parameters
        ----------
        report : Report
        loss : 0-d tensor or None
        leaves : (k,) tensor or None
            The norms of the gradients.
        params : dict of str to variable
            All parameters, by their names.
        grads : dict of str to tensor
            The gradients of the variables that have one.
        """
        names = self._known(params)
        places = [names.index(path[0]) for path in flatten(grads).paths()] if self._record.leaves else None
        parts = report.parts()
        given: Any = [part[2:] for part in parts], loss, leaves
        values, spec = optree.tree_flatten(given)
        tensors = {number: value for number, value in enumerate(values) if tf.is_tensor(value)}

        def record(*arrays: Any) -> None:
            found = dict(zip(tensors, arrays, strict=True))
            all_values = [found.get(number, value) for number, value in enumerate(values)]
            fields, loss, leaves = optree.tree_unflatten(spec, all_values)
            made = [Parts(*part[:2], *some) for part, some in zip(parts, fields, strict=True)]
            self._record.take(made, loss=loss, leaves=[] if leaves is None else [leaves], places=places)

        if tf.executing_eagerly():
            record(*tensors.values())
            return []
        return [tf.numpy_function(record, list(tensors.values()), [])]

    def _known(self, params: dict[str, Any]) -> list[str]:
        """Describe the rule and the variables to the recorder, once; return the names in the order of the leaves."""
        tree = flatten({name: np.broadcast_to(np.zeros(()), v.shape.num_elements() or 0) for name, v in params.items()})
        names = [str(path[0]) for path in tree.paths()]
        if self._names is None:
            self._record.describe(self._rule, tree)
            self._names = names
        if self._record.leaves and names != self._names:
            others = sorted(set(names).symmetric_difference(self._names))
            msg = (
                f"norms of leaves are recorded, and {short(others)} are in one apply_gradients and not in another: "
                "give each train op of other variables a ClippedOptimizer and a recorder of its own"
            )
            raise ValueError(msg)
        return names
