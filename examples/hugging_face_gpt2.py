# SPDX-License-Identifier: MIT
"""Hugging Face's Trainer with any rule of uniclip: one callback, here with an adaptive limit.

A tiny GPT-2, made from a config, learns to continue this repository's README character by
character; nothing is downloaded. Each epoch prints the values that the callback added to the
Trainer's log: the norm and the limit of its last step, and the share of its clipped steps. Needs
``pip install "uniclip-gradients[demo]" "transformers[torch]"``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import uniclip as uc
from uniclip.integrations.transformers import ClipGradients

TEXT = Path(__file__).parent.parent / "README.md"
EPOCHS, BATCH, LENGTH, CHARACTERS = 8, 8, 64, 128
SHOWN = ("loss", "clip/norm", "clip/limit", "clip/share")


class Pieces(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Overlapping pieces of a text, each starting half a piece after the one before.

    Characters are ASCII codes.
    """

    def __init__(self, text: str) -> None:
        self.codes = torch.tensor(list(text.encode("ascii", errors="replace")))

    def __len__(self) -> int:
        """Return the number of pieces."""
        return 2 * len(self.codes) // LENGTH - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a piece; the model shifts the labels by itself."""
        piece = self.codes[index * LENGTH // 2 :][:LENGTH]
        return {"input_ids": piece, "labels": piece}


def make_model() -> GPT2LMHeadModel:
    """Return a random GPT-2 of 0.1 million parameters."""
    torch.manual_seed(0)
    size = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "n_positions": LENGTH,
        "vocab_size": CHARACTERS,
    }
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def train(folder: str) -> list[dict[str, float]]:
    """Train, and return the logged values of each epoch."""
    arguments = TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(
        make_model(),
        arguments,
        train_dataset=Pieces(TEXT.read_text(encoding="utf-8")),
        callbacks=[ClipGradients(uc.autoclip(percentile=75))],  # the one line
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Train, print the logged values, and fail if the loss did not fall."""
    # The matrices are so small that threads would only wait for each other.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        epochs = train(folder)
    print("\nepoch" + "".join(f"{name:>12}" for name in SHOWN))
    for entry in epochs:
        print(f"{entry['epoch']:5.0f}" + "".join(f"{entry[name]:12.3f}" for name in SHOWN))
    if not epochs[-1]["loss"] < epochs[0]["loss"]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
