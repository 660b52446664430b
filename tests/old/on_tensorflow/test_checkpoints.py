"""Files that TensorFlow writes: what a `Clipper` and a rule's pure form remember comes back bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checkpoints import RULES

import uniclip as uc


def steps_of(count: int = 8) -> list[Any]:
    """Return the gradients of some steps."""
    rng = np.random.default_rng(0)
    return [
        [tf.constant(size * rng.normal(size=(3, 2)), tf.float32), tf.constant(size * rng.normal(size=3), tf.float32)]
        for size in 10 ** rng.uniform(-1, 1, count)
    ]


def same(one: Any, other: Any) -> None:
    """Compare two trees bit by bit."""
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_state_dict(tmp_path: Path, rule: Any) -> None:
    """As JSON in a variable it is part of a checkpoint."""
    steps, clipper = steps_of(), uc.Clipper(rule)
    for grads in steps[:4]:
        clipper(grads)
    file = tf.train.Checkpoint(clipper=tf.Variable(json.dumps(clipper.state_dict()))).save(str(tmp_path / "checkpoint"))
    memory = tf.Variable("")
    tf.train.Checkpoint(clipper=memory).restore(file).assert_consumed()
    again = uc.Clipper(rule)
    again.load_state_dict(json.loads(memory.numpy()))
    for grads in steps[4:]:
        same(again(grads), clipper(grads))
        same(again.state, clipper.state)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_pure_form(tmp_path: Path, rule: Any) -> None:
    """In variables, which `tf.function` reads and assigns, the state is part of a checkpoint as weights are."""

    def fresh() -> tuple[Any, Any]:
        memory = tf.nest.map_structure(tf.Variable, rule.init(steps[0]))

        @tf.function
        def clip(grads: Any) -> Any:
            clipped, state, _ = rule.update(grads, tf.nest.map_structure(tf.convert_to_tensor, memory))
            tf.nest.map_structure(lambda variable, value: variable.assign(value), memory, state)
            return clipped

        return clip, tf.train.Checkpoint(memory=tf.nest.flatten(memory))

    steps = steps_of()
    (clip, checkpoint), (again, other) = fresh(), fresh()
    for grads in steps[:4]:
        clip(grads)
    other.restore(checkpoint.save(str(tmp_path / "checkpoint"))).assert_consumed()
    for grads in steps[4:]:
        same(again(grads), clip(grads))
