# SPDX-License-Identifier: MIT
"""A recurrent network learns to write a license: PyTorch, mixed precision, and one line that clips.

It reads LICENSE character by character, under CPU autocast to bfloat16 and with a GradScaler.
`attach` is the whole integration: the norms are those of the unscaled gradients, and the limit is
adaptive (the 75th percentile of the last fifty norms). Prints a table, and exits with 1 if the loss
did not fall. Needs ``pip install "uniclip-gradients[demo]" torch``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tqdm import tqdm

import uniclip as uc
from uniclip.integrations.torch import attach

TEXT = Path(__file__).parent.parent / "LICENSE"
SHOWN = ("loss", "clip/norm", "clip/limit", "clip/share")
EPOCHS, STEPS, BATCH, LENGTH, HIDDEN = 6, 25, 16, 48, 96


class Writer(torch.nn.Module):
    """A model that predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(characters, 24)
        self.lstm = torch.nn.LSTM(24, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return a score for each character, at each position."""
        # Some CPUs have no LSTM in bfloat16.
        with torch.autocast("cpu", enabled=False):
            read, _ = self.lstm(self.embedding(text))
        return self.head(read)


def draw(text: torch.Tensor) -> torch.Tensor:
    """Return random passages of the text, each one character longer than the input."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    return text[starts + torch.arange(LENGTH + 1)]


def main() -> None:
    """Train, and print the clipped steps."""
    torch.manual_seed(0)
    # The matrices are so small that threads would only wait for each other.
    torch.set_num_threads(1)
    letters = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(letters))
    text = torch.tensor([alphabet.index(letter) for letter in letters])

    model = Writer(len(alphabet))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, fused=True)
    handle = attach(optimizer, uc.autoclip(75, window=50, nonfinite="skip"))  # the one line
    scaler = torch.amp.GradScaler("cpu")

    losses = []
    print("epoch {:>6} {:>10} {:>11} {:>11}".format(*SHOWN))
    for epoch in range(EPOCHS):
        seen = []
        for _ in tqdm(range(STEPS), desc=f"epoch {epoch}", leave=False):
            passages = draw(text)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(passages[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    scores.flatten(0, 1), passages[:, 1:].flatten()
                )
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            # The scaler may skip the first steps.
            if handle.report is not None:
                # This reads no value from the device.
                seen.append({"loss": loss.detach(), **handle.scalars()})
        mean = {
            name: torch.stack([step[name].float() for step in seen]).mean().item()
            for name in seen[0]
        }
        losses.append(mean["loss"])
        print(
            "{:5} {:6.3f} {:10.3f} {:11.3f} {:11.0%}".format(epoch, *(mean[name] for name in SHOWN))
        )
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss did not fall: {losses}")


if __name__ == "__main__":
    main()
