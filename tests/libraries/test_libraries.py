"""Libraries that clip inside: they train the same with their own clipping disabled."""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if torch.version.cuda is None and "+cpu" not in version("torchvision"):  # its operators need CUDA
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )

import timm
from datasets import Dataset
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from timm.optim import Lamb
from timm.utils import NativeScaler
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import uniclip as uc
from uniclip import insight
from uniclip.integrations.torch import attach
from uniclip.integrations.transformers import ClipGradients, ClippedTrainer

RULE = uc.by_global_norm(0.05)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Require the same weights up to rounding."""
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        np.testing.assert_allclose(p.detach(), q.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


AGENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO": (PPO, {"n_steps": 32, "batch_size": 16, "n_epochs": 2}),
    "A2C": (A2C, {"n_steps": 8}),
    "DQN": (
        DQN,
        {
            "learning_starts": 16,
            "train_freq": 4,
            "batch_size": 8,
            "policy_kwargs": {"net_arch": [8]},
        },
    ),
}


def agent(name: str, max_grad_norm: float = math.inf, **options: Any) -> Any:
    """Return a small agent of Stable-Baselines3 for the pole on a cart.

    Each one seeds the global generator.
    """
    make, own = AGENTS[name]
    return make(
        "MlpPolicy",
        "CartPole-v1",
        max_grad_norm=max_grad_norm,
        seed=0,
        device="cpu",
        **{**own, **options},
    )


class Attach(BaseCallback):
    """Attaches a rule when the training starts."""

    def _on_training_start(self) -> None:
        self.handle = attach(self.model.policy.optimizer, RULE, names=self.model.policy)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self.handle.remove()


@pytest.mark.parametrize("name", AGENTS)
def test_stable_baselines3(name: str) -> None:
    """An attached rule takes the steps of the library's own clipping, also through a callback."""
    native, plain = agent(name, 0.05).learn(96), agent(name).learn(96)
    attached = agent(name).learn(96, callback=Attach())
    assert_same(native.policy, attached.policy)
    with pytest.raises(AssertionError):
        assert_same(native.policy, plain.policy)


class ClippedAdam(torch.optim.Adam):
    """An optimizer that attaches its rule when a library creates it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.clipping = attach(self, uc.autoclip(50, window=32))


def test_autoclip_saved_and_loaded(tmp_path: Path) -> None:
    """A rule is attached before the parameters are loaded, or by the class of the optimizer.

    In the latter case ``load`` restores everything.
    """
    path = tmp_path / "agent.zip"
    first, second = agent("PPO"), agent("PPO")
    handles = [
        attach(made.policy.optimizer, uc.autoclip(50, window=32), names=made.policy)
        for made in (first, second)
    ]
    first.learn(64)
    first.save(path)
    second.set_parameters(path)
    assert handles[1].numbers() == handles[0].numbers()

    made = agent(
        "PPO", policy_kwargs={"optimizer_class": ClippedAdam, "optimizer_kwargs": {"eps": 1e-5}}
    )
    made.learn(64)
    made.save(path)
    loaded = PPO.load(path, device="cpu")
    assert made.policy.optimizer.clipping.numbers()["state"]["count"] == [8]
    assert loaded.policy.optimizer.clipping.numbers() == made.policy.optimizer.clipping.numbers()


def test_clipped_before(tmp_path: Path) -> None:
    """If the library's clipping is left on, the summary of the run reports it."""
    made = agent("PPO", 0.05)
    with insight.Recorder(tmp_path / "run.jsonl") as record:
        attach(made.policy.optimizer, RULE, record=record)
        made.learn(64)
    assert "something else seems to clip first" in insight.summary(
        insight.read(tmp_path / "run.jsonl")
    )


def sft(
    folder: Path, kind: Any = SFTTrainer, *, max_grad_norm: float = 0.05, **options: Any
) -> Any:
    """Train a small language model by TRL."""
    torch.manual_seed(0)
    words = {
        word: number for number, word in enumerate(["<pad>", "<eos>", "a", "rule", "clips", "once"])
    }
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), **special
    )
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": len(words)}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=1))
    quiet: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
    }
    quiet |= {
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
    }
    arguments = SFTConfig(str(folder), max_grad_norm=max_grad_norm, **quiet)
    data = [{"input_ids": [2, 3, 4, 5, 1]}, {"input_ids": [3, 4, 2, 5, 1]}] * 4
    made = kind(
        model,
        arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        **options,
    )
    made.train()
    return made


class Clipped(ClippedTrainer, SFTTrainer):
    """A trainer of TRL that clips."""


@pytest.mark.filterwarnings("ignore:max_grad_norm", "ignore:.*gradient_checkpointing:FutureWarning")
def test_trl(tmp_path: Path) -> None:
    """The callback and the mixin disable the library's clipping, and take the same steps."""
    native = sft(tmp_path)
    with pytest.raises(AssertionError):
        assert_same(native.model, sft(tmp_path, max_grad_norm=0.0).model)
    for made in (sft(tmp_path, callbacks=[ClipGradients(RULE)]), sft(tmp_path, Clipped, rule=RULE)):
        assert_same(native.model, made.model)
        logged = [row["clip/norm"] for row in made.state.log_history if "clip/norm" in row]
        own = [row["grad_norm"] for row in made.state.log_history if "grad_norm" in row]
        np.testing.assert_allclose(logged, own, rtol=1e-5)
        assert len(logged) == 4


def train_timm(make: Any, **clipping: Any) -> torch.nn.Module:
    """Train a small network of timm like its own script."""
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=32)
    optimizer = make(model)
    scaler = NativeScaler(device="cpu")
    for _ in range(3):
        loss = model(torch.randn(2, 3, 32, 32)).square().mean()
        scaler(
            loss,
            optimizer,
            parameters=timm.models.model_parameters(model, exclude_head=True),
            **clipping,
        )
        optimizer.zero_grad()
    return model


def sgd(model: torch.nn.Module) -> Any:
    """Return an optimizer without names."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_timm() -> None:
    """AGC without the head uses the names of the model."""
    rule = uc.masked(uc.agc(0.01), lambda path, leaf: not path[1].startswith("head."))

    def clipped(model: torch.nn.Module) -> Any:
        optimizer = sgd(model)
        attach(optimizer, rule, names=model)
        return optimizer

    plain, native = train_timm(sgd), train_timm(sgd, clip_grad=0.01, clip_mode="agc")
    assert_same(native, train_timm(clipped))
    with pytest.raises(AssertionError):
        assert_same(plain, native)


def test_an_optimizer_that_clips_inside() -> None:
    """Lamb of timm clips by default, and ``None`` disables it."""

    def clipped(model: torch.nn.Module) -> Any:
        optimizer = Lamb(model.parameters(), lr=0.01, max_grad_norm=None)
        attach(optimizer, uc.by_global_norm(0.01), names=model)
        return optimizer

    native = train_timm(lambda model: Lamb(model.parameters(), lr=0.01, max_grad_norm=0.01))
    assert_same(native, train_timm(clipped))
