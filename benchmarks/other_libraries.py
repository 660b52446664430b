# SPDX-License-Identifier: MIT
"""What users of four more libraries write to clip, in PyTorch; these are not installed where the docs are built.

In an environment with all that the docs need::

    python -m pip install --no-deps timm opacus smartclip deepmd-kit mpich opt_einsum
    python benchmarks/other_libraries.py

writes ``docs/compared.json``.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
import types
from collections import Counter
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import features
import sharded

import how_others_behave
import side_by_side
from kit.frameworks import Torch
from native_functions import InPlace

TIMM = {
    "import": "import torch; from timm.utils.clip_grad import dispatch_clip_grad",
    "by global norm": "dispatch_clip_grad(params, c)",
    "by value": 'dispatch_clip_grad(params, c, mode="value")',
}
OPACUS = {
    "import": "import torch, opacus; from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer",
    "sum of clipped examples": (
        "DPOptimizer(torch.optim.SGD(params, 1.0), noise_multiplier=0.0, max_grad_norm=c, "
        'expected_batch_size=1, loss_reduction="sum").pre_step()'
    ),
}
SMARTCLIP = {"import": "import torch, smartclip"}
DEEPMD = {
    "import": "import torch; from deepmd.pt_expt.train.gradient import NonFiniteGradGuard, clip_grad_norm_",
    "by global norm": "clip_grad_norm_(params, c)",
}


class Examples(InPlace):
    """Opacus clips the ``.grad_sample`` of parameters, which has the examples along its first axis."""

    def call(self, kind: str, grads: list[Any], c: float, **places: Any) -> Any:
        """Return the sums that the parameters have as gradients afterwards."""
        torch = self.modules["torch"]
        params = [torch.nn.Parameter(torch.zeros(g.shape[1:], dtype=g.dtype)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad_sample = g
        super(InPlace, self).call(kind, grads, c, params=params, **places)
        return [p.grad for p in params]


class Timm(InPlace):
    """timm imports all its models, and with them torchvision; its functions that clip need neither."""

    @cached_property
    def modules(self) -> dict[str, Any]:
        """Import the module of the functions without the packages that it is in."""
        for name in ("timm", "timm.utils"):
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                package = types.ModuleType(name)
                package.__path__ = list(spec.submodule_search_locations or [])
                sys.modules[name] = package
        return super().modules


OTHERS = (
    Timm("timm", Torch(), TIMM, "timm"),
    Examples("Opacus", Torch(), OPACUS, "opacus", frozenset({"sparse", "derivative"})),
    InPlace("smartclip", Torch(), SMARTCLIP, "smartclip"),
    InPlace("deepmd-kit", Torch(), DEEPMD, "deepmd-kit mpich"),
)


def check() -> None:
    """Refuse a call that is right in none of the usual cases: it is written wrongly."""
    usual = how_others_behave.GROUPS[0].cases
    for lib in OTHERS:
        right = {case.kind for case in usual if side_by_side.alone(lib, case).mark == side_by_side.RIGHT}
        if wrong := lib.calls.keys() - right - {"import"}:
            msg = f"{lib.name}: {', '.join(sorted(wrong))}"
            raise ValueError(msg)


def measured() -> dict[str, Any]:
    """Run the cases and the features on these libraries."""
    check()
    cases = [case for group in how_others_behave.GROUPS for case in group.cases]
    marks = {lib.name: Counter(side_by_side.alone(lib, case).mark for case in cases) for lib in OTHERS}
    return {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in [*(lib.name.lower() for lib in OTHERS), "torch"]},
        "number of cases": len(cases),
        "cases": {name: dict(sorted(counts.items())) for name, counts in marks.items()},
        "sharded": sharded.marks(),
        "features": {lib.name: features.marks(lib) for lib in OTHERS},
    }


if __name__ == "__main__":
    path = Path(__file__).parent.parent / "docs" / "compared.json"
    path.write_text(json.dumps(measured(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
