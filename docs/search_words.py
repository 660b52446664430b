# SPDX-License-Identifier: MIT
"""A Sphinx extension: a word that people search for leads first to the page about it, though others have it, too."""

from __future__ import annotations

from typing import Any

WORDS = {
    "checkpoints": ["checkpoint", "resume"],
    "choose-a-limit": ["threshold", "max_norm", "limit"],
    "compared": ["comparison"],
    "dp-sgd": ["DP-SGD", "differential privacy", "per-example"],
    "embeddings": ["embedding", "sparse", "IndexedSlices"],
    "gradient-accumulation": ["accumulate", "accumulation", "micro-batch"],
    "log-and-plot": ["plot", "log", "TensorBoard", "W&B", "wandb", "MLflow"],
    "mixed-precision": ["AMP", "GradScaler", "mixed precision", "loss scale"],
    "moving-from": ["timm", "clipnorm", "max_grad_norm", "gradient_clip_val"],
    "nan-and-infinity": ["NaN", "inf", "infinity", "nonfinite"],
    "parameter-groups": ["per layer", "per-layer", "parameter groups"],
    "performance": ["speed", "benchmark"],
    "rules/index": ["gallery", "rules"],
    "use-it-on-many-processes": ["FSDP", "DDP", "DTensor", "tensor parallel", "pipeline parallel"],
    "what-happened-at-step-n": ["spike", "loss spike"],
    "write-your-own-rule": ["custom rule"],
    "your-numbers-changed": ["numbers changed", "epsilon"],
}
"""The pages, and the words that find them first; ``check_pages.py`` searches for each."""


def add_words(app: Any, page: str, source: list[str]) -> None:  # noqa: ARG001 - the signature of the event
    """Begin a page with its words as entries of the index, which the search ranks before titles and text."""
    if page in WORDS:
        entries = ", ".join(f"! {word}" for word in WORDS[page])
        source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", add_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
