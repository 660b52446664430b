# SPDX-License-Identifier: MIT
"""Search words, each with the page that the search must show first."""

from __future__ import annotations

from typing import Any

WORDS = {
    "a-limit-for-each-group": ["per layer", "per-layer", "parameter groups"],
    "checkpoints": ["checkpoint", "resume"],
    "choose-a-limit": ["threshold", "max_norm", "limit"],
    "compared": ["comparison"],
    "dp-sgd": ["DP-SGD", "differential privacy", "per-example"],
    "embeddings": ["embedding", "sparse", "IndexedSlices"],
    "gradient-accumulation": ["accumulate", "accumulation", "micro-batch"],
    "log-and-plot": ["plot", "log", "TensorBoard", "W&B", "wandb", "MLflow"],
    "mixed-precision": ["AMP", "GradScaler", "mixed precision", "loss scale"],
    "moving-from": ["timm", "clipnorm", "max_grad_norm", "gradient_clip_val"],
    "other-array-libraries": ["CuPy", "MLX", "dask", "array API"],
    "performance": ["speed", "benchmark"],
    "promises": ["edge case", "sync"],
    "rl-and-llm": ["GRPO", "TRL", "verl"],
    "rules/index": ["gallery", "rules"],
    "skip-a-step": ["NaN", "inf", "infinity", "nonfinite", "skip"],
    "use-it-on-many-processes": ["FSDP", "DDP", "DTensor", "tensor parallel", "pipeline parallel"],
    "use-it-with-pytorch": ["Stable-Baselines3", "sb3", "CUDA graph"],
    "versions": ["numbers changed", "epsilon"],
    "what-happened-at-step-n": ["spike", "loss spike"],
    "write-your-own-rule": ["custom rule"],
}
"""The pages with their words; ``check_pages.py`` searches for each."""


def add_words(app: Any, page: str, source: list[str]) -> None:  # noqa: ARG001 - the signature of the event
    """Add the words of a page to its index, which the search ranks before titles and text."""
    if page in WORDS:
        entries = ", ".join(f"! {word}" for word in WORDS[page])
        source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"
