"""Files that PyTorch writes: what a `Clipper` and a rule's pure form remember comes back bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from checkpoints import RULES

import uniclip as uc


def steps_of(count: int = 8, dtype: Any = torch.float32) -> list[Any]:
    """Return the gradients of some steps."""
    made = torch.Generator().manual_seed(0)
    sizes = 10 ** (2 * torch.rand(count, generator=made) - 1)
    return [
        {name: (size * torch.randn(shape, generator=made)).to(dtype) for name, shape in (("w", (3, 2)), ("b", (3,)))}
        for size in sizes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_state_dict(tmp_path: Path, rule: Any, dtype: Any) -> None:
    """`torch.load` reads it with weights_only, its default."""
    steps, clipper = steps_of(dtype=dtype), uc.Clipper(rule)
    for grads in steps[:4]:
        clipper(grads)
    torch.save({"clipper": clipper.state_dict(), "step": 4}, tmp_path / "checkpoint.pt")
    again = uc.Clipper(rule)
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["clipper"])
    for grads in steps[4:]:
        torch.testing.assert_close(again(grads), clipper(grads), rtol=0, atol=0)
        torch.testing.assert_close(again.state, clipper.state, rtol=0, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_tensors(tmp_path: Path, rule: Any) -> None:
    """The state itself, for one as large as the model: its tensors in a list, put back into a fresh state."""
    steps, clipper = steps_of(), uc.Clipper(rule)
    for grads in steps[:4]:
        clipper(grads)
    torch.save(optree.tree_leaves(clipper.state), tmp_path / "state.pt")
    again = uc.Clipper(rule)
    tensors = torch.load(tmp_path / "state.pt")
    again.state = optree.tree_unflatten(optree.tree_structure(rule.init(steps[0])), tensors)
    for grads in steps[4:]:
        torch.testing.assert_close(again(grads), clipper(grads), rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_is_kept_alive(rule: Any, in_place: bool) -> None:
    """What is remembered of gradients that record derivatives records none, and can be saved."""
    clipper = uc.Clipper(rule)
    for grads in steps_of():
        w, b = (grads[name].requires_grad_() for name in ("w", "b"))
        tree = {"w": 2 * w, "b": 2 * b}  # as of backward(create_graph=True)
        if in_place:
            clipper.clip_(tree)
        else:
            clipped = clipper(tree)
            assert clipped["w"].requires_grad
        for tensor in optree.tree_leaves(clipper.state):
            assert not tensor.requires_grad
            assert tensor.grad_fn is None
    assert json.loads(json.dumps(clipper.state_dict())) == clipper.state_dict()


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    """A loop that is stopped and goes on from a file takes bitwise the steps of one that was not."""

    def train(net: Any, optimizer: Any, clipper: uc.Clipper, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)) * (1 + 9 * (step % 5 == 4))
            optimizer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            clipper.clip_([p.grad for p in net.parameters()])
            optimizer.step()
            losses.append(loss.item())
        return losses

    def fresh() -> tuple[Any, Any, uc.Clipper]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1), uc.Clipper(RULES[0])

    whole = train(*fresh(), range(20))
    stopped = fresh()
    losses = train(*stopped, range(10))
    torch.save([part.state_dict() for part in stopped], tmp_path / "checkpoint.pt")
    resumed, forgetful = fresh(), fresh()
    saved = torch.load(tmp_path / "checkpoint.pt")
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    for part, state in zip(forgetful[:2], saved, strict=False):
        part.load_state_dict(state)
    assert losses + train(*resumed, range(10, 20)) == whole
    assert losses + train(*forgetful, range(10, 20)) != whole
