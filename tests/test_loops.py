"""Small versions of the loops of public programs: their losses do not change with uniclip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import uniclip as uc
from uniclip import insight

LIMIT = 0.02
RNG = np.random.default_rng(11)
X, Y = RNG.standard_normal((8, 4)).astype("float32"), RNG.standard_normal((8, 2)).astype("float32")
STEPS = 6

Loop: TypeAlias = Callable[[str], list[float]]
"""Takes steps with its own clipping, with uniclip, or with none, and returns the losses."""


def network(width: int = 8) -> tuple[Any, Any, Any]:
    """Return a PyTorch network, whose parameters have no names in an optimizer, and a batch."""
    import torch

    torch.manual_seed(0)
    body = [torch.nn.Linear(4, width), torch.nn.LayerNorm(width), torch.nn.Tanh()]
    return torch.nn.Sequential(*body, torch.nn.Linear(width, 2)), torch.tensor(X), torch.tensor(Y)


def accumulate_scaled(clips: str) -> list[float]:
    """Train like nanoGPT: two groups by weight decay, micro-batches, unscaling before clipping."""
    import torch

    from uniclip.integrations.torch import attach

    model, x, y = network()
    parts = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [
        {"params": some, "weight_decay": decay}
        for some, decay in zip(parts, (0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    if clips == "uniclip":
        attach(optimizer, uc.by_global_norm(LIMIT), names=model)
    for _ in range(STEPS):
        for rows in slice(4), slice(4, 8):
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows]) / 2
            scaler.scale(loss).backward()
            losses.append(loss.item())
        if clips == "own":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def go_over_a_batch_again(clips: str) -> list[float]:
    """Train like PPO in CleanRL: several epochs over the minibatches of one rollout."""
    import torch

    from uniclip.integrations.torch import attach

    model, x, _ = network()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-5), []
    if clips == "uniclip":
        attach(optimizer, uc.by_global_norm(LIMIT), names=model)
    actions = torch.distributions.Categorical(logits=model(x)).sample()
    old = torch.distributions.Categorical(logits=model(x)).log_prob(actions).detach()
    for _ in range(STEPS):
        for rows in torch.randperm(8).split(4):
            ratio = (
                torch.distributions.Categorical(logits=model(x[rows])).log_prob(actions[rows])
                - old[rows]
            ).exp()
            advantage = torch.tensor(Y)[rows, 0]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            if clips == "own":
                torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            losses.append(loss.item())
    return losses


def move_by_hand(clips: str) -> list[float]:
    """Train like PyTorch's word language model: without an optimizer, by the drop-in functions."""
    import torch

    from uniclip.integrations.torch import clip_grad_norm_

    torch.manual_seed(0)
    model, hidden, losses = torch.nn.LSTM(4, 2), None, []
    for _ in range(STEPS):
        model.zero_grad()
        output, hidden = model(torch.tensor(X)[:, None], hidden)
        hidden = tuple(one.detach() for one in hidden)
        loss = torch.nn.functional.mse_loss(output[:, 0], torch.tensor(Y))
        loss.backward()
        clip = {"own": torch.nn.utils.clip_grad_norm_, "uniclip": clip_grad_norm_}.get(clips)
        if clip:
            clip(model.parameters(), LIMIT)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-10.0)
        losses.append(loss.item())
    return losses


def leave_out_the_head(clips: str) -> list[float]:
    """Train like timm: adaptive clipping of all parameters but the head."""
    import torch

    from uniclip.integrations.torch import attach

    model, x, y = network()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    if clips == "uniclip":
        attach(
            optimizer,
            uc.masked(uc.agc(LIMIT), lambda path, leaf: not path[1].startswith("3.")),
            names=model,
        )
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in list(model.parameters())[:-2] if clips == "own" else []:
            size, norm = (
                torch.linalg.vector_norm(
                    one, dim=tuple(range(one.ndim > 1, one.ndim)), keepdim=True
                )
                for one in (p.detach(), p.grad)
            )
            p.grad *= (LIMIT * size.clamp(min=1e-3) / norm).clamp(max=1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


class Agent:
    """An agent that creates its optimizer, and clips in its own training step."""

    def __init__(self, max_grad_norm: float, optimizer_class: Any) -> None:
        self.model, self.x, self.y = network()
        self.max_grad_norm = max_grad_norm
        self.optimizer = optimizer_class(self.model.parameters(), lr=0.1)

    def learn(self) -> list[float]:
        """Take steps."""
        import torch

        losses = []
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def clip_inside(clips: str) -> list[float]:
    """Train like Stable-Baselines3, with its own clipping disabled."""
    import torch

    from uniclip.integrations.torch import attach

    agent = Agent(LIMIT if clips == "own" else float("inf"), torch.optim.Adam)
    if clips == "uniclip":
        attach(agent.optimizer, uc.by_global_norm(LIMIT), names=agent.model)
    return agent.learn()


def scan_it_all(clips: str, tell: Callable[[Any], None] = lambda rows: None) -> list[float]:
    """Train like PureJaxRL: all steps in one ``jit`` and ``scan``, which returns their scalars."""
    import jax
    import jax.numpy as jnp
    import optax

    from uniclip.integrations.optax import scalars, to_optax

    clip = {"own": optax.clip_by_global_norm(LIMIT), "uniclip": to_optax(uc.by_global_norm(LIMIT))}
    optimizer = optax.chain(clip.get(clips, optax.identity()), optax.adam(0.1))
    params = {"w": jnp.ones((4, 2)) / 2, "b": jnp.zeros(2)}

    def step(carried: Any, _: Any) -> Any:
        params, state = carried
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((X @ p["w"] + p["b"] - Y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        row = scalars(state) if clips == "uniclip" else {}
        return (optax.apply_updates(params, updates), state), (loss, row)

    _, (losses, rows) = jax.jit(lambda first: jax.lax.scan(step, first, length=STEPS))(
        (params, optimizer.init(params))
    )
    tell((rows, losses))
    return losses.tolist()


def replay_in_keras(clips: str) -> list[float]:
    """Train like deep Q-learning in Keras' examples: a tape, and an optimizer that clips."""
    import keras
    import tensorflow as tf

    from uniclip.integrations.keras import ClippedOptimizer

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )
    own = {"clipnorm": LIMIT} if clips == "own" else {}
    optimizer, losses = keras.optimizers.Adam(0.1, **own), []
    if clips == "uniclip":
        optimizer = ClippedOptimizer(optimizer, uc.by_norm(LIMIT))
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return losses


LOOPS: dict[Loop, str] = {
    accumulate_scaled: "torch",
    go_over_a_batch_again: "torch",
    move_by_hand: "torch",
    leave_out_the_head: "torch",
    clip_inside: "torch",
    scan_it_all: "optax",
    replay_in_keras: "keras",
}


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=pytest.mark.needs(name), id=loop.__name__)
        for loop, name in LOOPS.items()
    ],
)
def test_loops(loop: Loop) -> None:
    """The losses equal those of the program, and differ from those of unclipped training."""
    own, ours, unclipped = loop("own"), loop("uniclip"), loop("none")
    np.testing.assert_allclose(ours, own, rtol=2e-5)
    assert max(abs(np.subtract(own, unclipped))) > 1e-3


@pytest.mark.needs("optax")
def test_a_scan_is_recorded(tmp_path: Path) -> None:
    """The rows that a scan returns are recorded at once, with the losses."""
    with insight.Recorder(tmp_path / "run.jsonl", rule=uc.by_global_norm(LIMIT)) as record:
        losses = scan_it_all("uniclip", lambda told: record(told[0], loss=told[1]))
    run = insight.read(tmp_path / "run.jsonl")
    np.testing.assert_allclose(run.losses, losses)
    assert insight.summary(run).startswith("100% of steps clipped: the limit acts as a normalizer")


@pytest.mark.needs("torch")
def test_a_class_that_attaches_its_rule(tmp_path: Path) -> None:
    """An optimizer that a library creates itself gets its rule and its state back on loading."""
    import torch

    from uniclip.integrations.torch import attach

    class ClippedAdam(torch.optim.Adam):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            self.clipping = attach(self, uc.autoclip(50, window=8))

    first, second = (Agent(float("inf"), ClippedAdam) for _ in range(2))
    first.learn()
    torch.save(first.optimizer.state_dict(), tmp_path / "agent.pt")
    second.optimizer.load_state_dict(torch.load(tmp_path / "agent.pt"))
    assert second.optimizer.clipping.numbers() == first.optimizer.clipping.numbers() != {}


@pytest.mark.needs("torch")
def test_what_was_clipped_before(tmp_path: Path) -> None:
    """With the library's own clipping left on, the summary reports that something else clips."""
    import torch

    from uniclip.integrations.torch import attach

    agent = Agent(LIMIT, torch.optim.Adam)
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        handle = attach(agent.optimizer, uc.by_global_norm(LIMIT), record=record)
        agent.learn()
    assert str(handle.report) == f"norm {LIMIT}, limit {LIMIT}, not clipped, finite"
    assert "something else seems to clip first" in insight.summary(
        insight.read(tmp_path / "run.jsonl")
    )
