# SPDX-License-Identifier: MIT
"""A small transformer in a pipeline of two FSDP2 stages: one line clips by the global norm.

Four processes on the CPU, two stages x two shards; it reads LICENSE character by character. The
gradients of a stage are sharded (DTensors, which uniclip reduces by itself), and a stage has only
some of the layers, which ``all_reduce=mesh["pp"]`` joins. It also trains the same model in one
process, prints both losses, and exits with 1 if they differ. Needs ``pip install uniclip-gradients
torch``, and starts by itself, or with torchrun::

    torchrun --nproc-per-node 4 examples/pipeline_fsdp2.py
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import uniclip as uc
from uniclip.integrations.torch import attach, check_layout

TEXT = Path(__file__).parent.parent / "LICENSE"
STAGES, PARTS, MICROBATCHES = 2, 2, 2
STEPS, BATCH, LENGTH, WIDTH, BLOCKS = 30, 16, 32, 48, 4
RULE = uc.by_global_norm(0.5)


class Stage(nn.Module):
    """Some transformer blocks: the first stage embeds characters, the last predicts the next
    one.
    """

    def __init__(
        self, blocks: dict[str, nn.Module], embedding: nn.Module | None, head: nn.Module | None
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleDict(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the next stage, or a score for each character, at each position."""
        x = x if self.embedding is None else self.embedding(x)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        for block in self.blocks.values():
            x = block(x, src_mask=mask, is_causal=True)
        return x if self.head is None else self.head(x)


def stage_of(letters: int, number: int, count: int) -> Stage:
    """Return one of the stages.

    Each process draws all of them, so that the weights are those of the whole model.
    """
    torch.manual_seed(0)
    embedding = nn.Embedding(letters, WIDTH)
    blocks = {
        str(n): nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        for n in range(BLOCKS)
    }
    head = nn.Linear(WIDTH, letters)
    mine = {name: block for name, block in blocks.items() if int(name) * count // BLOCKS == number}
    return Stage(mine, embedding if number == 0 else None, head if number == count - 1 else None)


def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def batches() -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the number of characters, and the same passages of the text in every process."""
    letters = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(letters))
    text = torch.tensor([alphabet.index(letter) for letter in letters])
    starts = torch.randint(
        len(text) - LENGTH, (STEPS, BATCH, 1), generator=torch.Generator().manual_seed(1)
    )
    passages = text[starts + torch.arange(LENGTH + 1)]
    return len(alphabet), [(some[:, :-1], some[:, 1:]) for some in passages]


def in_one_process() -> list[float]:
    """Train the whole model, and return its losses."""
    letters, data = batches()
    model = stage_of(letters, 0, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.3, momentum=0.9)
    attach(optimizer, RULE)
    losses = []
    for read, wanted in data:
        optimizer.zero_grad()
        loss = loss_of(model(read), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_a_pipeline(mesh: DeviceMesh) -> list[float]:
    """Train one stage with FSDP2, and return the losses, which only the last stage has."""
    letters, data = batches()
    number, last = mesh["pp"].get_local_rank(), mesh["pp"].get_local_rank() == STAGES - 1
    module = stage_of(letters, number, STAGES)
    for block in module.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, number, STAGES, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)

    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.3, momentum=0.9)
    handle = attach(optimizer, RULE, all_reduce=mesh["pp"])  # the one line
    losses = []
    for step, batch in enumerate(data):
        read, wanted = (some.chunk(PARTS)[mesh["dp"].get_local_rank()] for some in batch)
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        schedule.step(
            *([read] if number == 0 else []),
            **({"target": wanted, "losses": found} if last else {}),
        )
        if step == 0:
            check = check_layout(optimizer, RULE, all_reduce=mesh["pp"])
            if distributed.get_rank() == 0:
                print(check)
            check.raise_if_wrong()
        optimizer.step()
        if last:
            loss = torch.stack(found).mean()
            distributed.all_reduce(loss, group=mesh["dp"].get_group())
            losses.append(loss.item() / PARTS)
            norms = handle.report.norms.item()
            if step % 5 == 0 and distributed.get_rank() == distributed.get_world_size() - 1:
                print(
                    f"step {step:2}: loss {losses[-1]:.4f}, norm of the whole model {norms:.4f}",
                    flush=True,
                )
    return losses


def main() -> None:
    """Train in both ways, and compare the losses."""
    warnings.filterwarnings("ignore", ".*nested tensors.*|.*returned a view tensor.*")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, PARTS), mesh_dim_names=("pp", "dp"))
    losses = in_a_pipeline(mesh)
    same = True
    if distributed.get_rank() == distributed.get_world_size() - 1:
        alone = in_one_process()
        same = all(abs(a - b) < 1e-5 for a, b in zip(losses, alone, strict=True))
        print(
            f"\nlast loss: {losses[-1]:.6f} in a pipeline x FSDP2, {alone[-1]:.6f} in one process"
        )
    distributed.barrier()
    distributed.destroy_process_group()
    if not (same and (not losses or losses[-1] < losses[0])):
        sys.exit(f"the losses differ, or did not fall: {losses}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        from torch.distributed.run import main as torchrun

        logging.disable()
        torchrun(["--standalone", "--nproc-per-node", str(STAGES * PARTS), __file__])
