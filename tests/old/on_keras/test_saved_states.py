"""The state of a rule between Keras' optimizer, on each of its backends, and `Clipper`; in the files of Keras, too."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

import uniclip as uc
from uniclip.integrations.keras import ClippedOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

SHAPES = {"w": (3, 2), "b": (2,)}
RULES = [
    uc.zclip(z=1.0, warmup=2),
    uc.adagc(warmup=2),
    uc.autoclip(50, window=6),
    uc.chain(uc.zclip(z=1.0, warmup=2), uc.masked(uc.adagc(warmup=2), lambda path, leaf: path[-1] == "w")),
]


def steps() -> list[dict[str, np.ndarray]]:
    """Return the gradients of some steps."""
    rng = np.random.default_rng(4)
    return [
        {name: np.asarray(size * rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}
        for size in 10 ** rng.uniform(-1, 1, 8)
    ]


def built(rule: Any) -> tuple[Any, list[Any]]:
    """Return an optimizer and its variables."""
    variables = [keras.Variable(np.zeros(shape, np.float32), name=name) for name, shape in SHAPES.items()]
    optimizer = ClippedOptimizer(keras.optimizers.SGD(1.0), rule)
    optimizer.build(variables)
    return optimizer, variables


def step(optimizer: Any, variables: list[Any], grads: Any) -> dict[str, Any]:
    """Return minus a step of plain descent."""
    for variable in variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    optimizer.apply([keras.ops.convert_to_tensor(grads[v.name]) for v in variables], variables)
    return {v.name: -keras.ops.convert_to_numpy(v.value) for v in variables}


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_both_ways(rule: Any) -> None:
    """What one learned goes on in the other."""
    clipper, (optimizer, variables) = uc.Clipper(rule), built(rule)
    for grads in steps()[:4]:
        clipper(grads)
    optimizer.load_rule_state_dict(json.loads(json.dumps(clipper.state_dict(), allow_nan=False)))
    for grads in steps()[4:6]:
        wanted = clipper(grads)
        for name, got in step(optimizer, variables, grads).items():
            np.testing.assert_allclose(got, wanted[name], rtol=2e-5)
    again = uc.Clipper(rule)
    again.load_state_dict(json.loads(json.dumps(optimizer.rule_state_dict(), allow_nan=False)))
    for grads in steps()[6:]:
        got, wanted = again(grads), clipper(grads)
        for name in SHAPES:
            np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5)


def test_units() -> None:
    """A state per output unit is of the last axis, on each backend; another one does not fit."""
    rule = uc.Rule(uc.limits.Ema(1.05, 0.5), scope=uc.scopes.unit())
    optimizer, variables = built(rule)
    step(optimizer, variables, steps()[0])
    saved = optimizer.rule_state_dict()
    assert np.shape(saved["state"]["0.averages"]) == (1, 2)
    other, _ = built(rule)
    other.load_rule_state_dict(saved)
    assert other.rule_state_dict() == saved
    saved["state"]["0.averages"] = [[1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match=r"the saved 0\.averages has shape \(1, 3\), but here it is \(1, 2\)"):
        other.load_rule_state_dict(saved)


@pytest.mark.any_backend
def test_the_format_of_a_file() -> None:
    """The number is in the files of Keras, too."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="layer")])
    model.compile(ClippedOptimizer(keras.optimizers.SGD(0.1), uc.adagc()), "mse")
    model.optimizer.build(model.trainable_variables)
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    known = json.loads(np.asarray(store["uniclip"]).tobytes())
    assert list(known) == ["format", "rule", "leaves"]
    store["uniclip"] = np.frombuffer(json.dumps(known | {"format": 2}).encode(), np.uint8)
    with pytest.raises(ValueError, match=r"format 2, .* or start over by loading the model without its optimizer"):
        model.optimizer.load_own_variables(store)
    turned = known | {"leaves": [known["leaves"][0][::-1]]}
    store["uniclip"] = np.frombuffer(json.dumps(turned).encode(), np.uint8)
    with pytest.raises(ValueError, match="their norms in another order"):
        model.optimizer.load_own_variables(store)
