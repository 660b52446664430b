# SPDX-License-Identifier: MIT
"""Lightning's Trainer with any rule of uniclip: one callback, here with an adaptive limit.

A recurrent network reads scikit-learn's handwritten digits row by row. Each epoch prints the values
that the callback has logged: the norm and the limit of its last step, and the share of its clipped
steps. Needs ``pip install "uniclip-gradients[demo]" lightning``.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits

import uniclip as uc
from uniclip.integrations.lightning import ClipGradients

EPOCHS, BATCH, HIDDEN, CLASSES = 8, 32, 64, 10
SHOWN = ("loss", "clip/norm", "clip/limit", "clip/share")


class Reader(LightningModule):
    """An LSTM that reads the eight rows of an image; its code does not mention clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, CLASSES)
        self.rows: list[list[float]] = []

    def training_step(self, batch: tuple[Any, Any], _: int) -> Any:
        """Return the loss, and log its mean over the epoch."""
        images, labels = batch
        hidden, _ = self.lstm(images)
        loss = torch.nn.functional.cross_entropy(self.head(hidden[:, -1]), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Store the logged values of this epoch."""
        self.rows.append([float(self.trainer.callback_metrics[name]) for name in SHOWN])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def load_batches() -> Any:
    """Return the digits, in another order in each epoch."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)


def be_quiet() -> None:
    """Silence Lightning's advice about this machine and about data loaders with many processes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")


def main() -> None:
    """Train, print the logged values, and fail if the loss did not fall."""
    be_quiet()
    # The matrices are so small that threads would only wait for each other.
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    model = Reader()
    trainer = Trainer(
        callbacks=[ClipGradients(uc.autoclip(percentile=75))],  # the one line
        max_epochs=EPOCHS,
        accelerator="cpu",
        # Any other logger gets the same values.
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, load_batches())
    print("\nepoch" + "".join(f"{name:>12}" for name in SHOWN))
    for epoch, row in enumerate(model.rows, start=1):
        print(f"{epoch:5}" + "".join(f"{value:12.3f}" for value in row))
    if not model.rows[-1][0] < model.rows[0][0]:
        sys.exit("the loss did not fall")


if __name__ == "__main__":
    main()
