"""The number of function calls in a call of uniclip, which is the same on every machine.

The numbers may only decrease.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import uniclip as uc
from kit.devices import is_on_host, on_torch
from kit.frameworks import EAGER, Framework

RECORDED = json.loads((Path(__file__).parent / "data" / "calls.json").read_text(encoding="utf-8"))
"""The numbers of Python and other functions, by framework and call, or of kernels by leaves."""
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}
"""Comprehensions are functions only before Python 3.12."""
EXACT = sys.version_info[:2] == (3, 11)
"""True for the versions of the recorded numbers; others may call less."""


def counted(
    call: Callable[..., Any], make: Callable[[], tuple[Any, ...]], folder: str = ""
) -> tuple[int, int]:
    """Return the numbers of Python and other functions in a call with new arguments.

    Only those of files in a ``folder`` are counted, if there is one.
    """
    counts = {"call": 0, "c_call": 0}

    def listen(frame: Any, event: str, arg: Any) -> None:
        inlined = event == "call" and frame.f_code.co_name in INLINED
        if event in counts and not inlined and folder in frame.f_code.co_filename:
            counts[event] += 1

    # The first calls import, compile and fill caches.
    for _ in range(3):
        call(*make())
    args = make()
    # A collection calls functions, too.
    gc.disable()
    sys.setprofile(listen)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    # The end of counting is a call, too.
    return counts["call"], counts["c_call"] - 1


def judge(framework: str, name: str, found: tuple[int, ...]) -> None:
    """Require the recorded numbers: larger ones are slower, and smaller ones must be recorded."""
    before = RECORDED[framework][name]
    assert all(n <= 1.03 * m + 2 for n, m in zip(found, before, strict=True)), (
        f"{name}: {found}, more than {before}"
    )
    assert not EXACT or all(n > 0.95 * m for n, m in zip(found, before, strict=True)), (
        f"fewer: write {name}: {found}, not {before}"
    )


def cases(
    framework: Framework,
) -> dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]:
    """Return usual calls, and functions for their arguments, ten leaves by default."""

    def grads(count: int = 10, zeros: int = 0) -> list[Any]:
        sizes = [0.0 if number < zeros else 1.0 for number in range(count)]
        return [
            framework.array(np.full((4, 3 + number), size)) for number, size in enumerate(sizes)
        ]

    def plain() -> tuple[Any, ...]:
        return (grads(),)

    rule, agc, zclip = uc.by_norm(0.5), uc.agc(0.01), uc.Clipper(uc.zclip(warmup=2))
    usual, clipper = uc.by_global_norm(1.0), uc.Clipper(uc.by_global_norm(1.0))
    found: dict[str, Any] = {
        "global_norm": (uc.global_norm, plain),
        "clip_by_global_norm": (lambda g: uc.clip_by_global_norm(g, 1.0), plain),
        "clip_by_global_norm below": (lambda g: uc.clip_by_global_norm(g, 1e9), plain),
        "clip_ by_global_norm": (lambda g: uc.clip_(g, usual), plain),
        "Clipper by_global_norm": (clipper, plain),
        "clip by_norm": (lambda g: uc.clip(g, rule), plain),
        "clip_ by_norm": (lambda g: uc.clip_(g, rule), plain),
        "clip agc": (lambda g: uc.clip(g, agc, params=g), plain),
        "Clipper zclip": (zclip, plain),
        "clip by_norm, thirty leaves": (lambda g: uc.clip(g, rule), lambda: (grads(30),)),
        "clip by_norm, thirty leaves, one of zeros": (
            lambda g: uc.clip(g, rule),
            lambda: (grads(30, 1),),
        ),
    }
    return found | (of_torch(grads) if framework.name == "torch" else {})


def of_torch(grads: Callable[..., list[Any]]) -> dict[str, Any]:
    """Return calls that only PyTorch has."""
    import torch

    from uniclip.integrations.torch import attach, clip_grad_norm_

    def params() -> list[Any]:
        made = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads()]
        for param, grad in zip(made, grads(), strict=True):
            param.grad = grad
        return made

    optimizer = torch.optim.SGD(params(), lr=0.1)
    attach(optimizer, uc.by_global_norm(1.0))

    def again() -> tuple[()]:
        for param, grad in zip(optimizer.param_groups[0]["params"], grads(), strict=True):
            param.grad = grad
        return ()

    def beside_a_sparse_one() -> tuple[Any, ...]:
        return ([*grads(30), EAGER["torch"][0]().sparse((5, 1), [3, 1], [[1.0], [2.0]])],)

    return {
        "clip_grad_norm_": (lambda p: clip_grad_norm_(p, 1.0), lambda: (params(),)),
        "clip_grad_norm_ by whole numbers": (
            lambda p: clip_grad_norm_(iter(p), 1, 2, error_if_nonfinite=True),
            lambda: (params(),),
        ),
        "optimizer.step, attached": (optimizer.step, again),
        "clip_by_global_norm, thirty leaves": (
            lambda g: uc.clip_by_global_norm(g, 1.0),
            lambda: (grads(30),),
        ),
        "clip_by_global_norm, thirty leaves and a sparse one": (
            lambda g: uc.clip_by_global_norm(g, 1.0),
            beside_a_sparse_one,
        ),
    }


def of_shards() -> dict[str, tuple[int, int]]:
    """Return the numbers of uniclip's own functions in calls on local shards.

    There is one process, which sends nothing.
    """
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from uniclip.integrations.torch import attach, clip_grad_norm_

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    full = [torch.ones(4, 3 + number) for number in range(10)]
    params = [torch.nn.Parameter(distribute_tensor(one, mesh, [Shard(0)])) for one in full]
    optimizer = torch.optim.SGD(params, lr=0.0)

    def make() -> tuple[()]:
        for param, one in zip(params, full, strict=True):
            param.grad = distribute_tensor(one.clone(), mesh, [Shard(0)])
            # The gradients of FSDP2 have the layout of their parameter.
            param.grad._spec = param._spec
        return ()

    found = {
        f"clip_grad_norm_{title}": counted(
            lambda c=c: clip_grad_norm_(params, c), make, "/uniclip/"
        )
        for title, c in (("", 1.0), (" below", 1e9))
    }
    rules = {
        "by_global_norm": uc.by_global_norm(1.0),
        "skip": uc.by_global_norm(1.0, nonfinite="skip"),
        "zclip": uc.zclip(warmup=2),
        "by_norm": uc.by_norm(0.5),
        "agc": uc.agc(0.01),
    }
    for name, rule in rules.items():
        handle = attach(optimizer, rule)
        found[f"attach {name}"] = counted(optimizer.step, make, "/uniclip/")
        handle.remove()
    return found


def judge_all(what: str) -> None:
    """Require the recorded numbers of a framework, or of local shards.

    They are counted in a process of its own, since earlier calls, such as `torch.compile`, may wrap
    functions for good.
    """
    done = subprocess.run(
        [sys.executable, __file__, what], check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)  # noqa: T201 - shown if the test fails
    found = json.loads(done.stdout)
    assert found.keys() == RECORDED[what].keys()
    for name, counts in found.items():
        judge(what, name, counts)


@pytest.mark.only("numpy", "torch")
def test_calls(framework: Framework) -> None:
    """The numbers of called functions are the recorded ones."""
    judge_all(framework.name)


@pytest.mark.needs("torch")
def test_calls_on_shards() -> None:
    """So are those of uniclip on the local shards of FSDP2."""
    judge_all("shards")


WITHOUT_KERNEL = {
    "alias",
    "as_strided",
    "detach",
    "empty_like",
    "expand",
    "permute",
    "select",
    "slice",
    "unbind",
    "unsqueeze",
    "view",
}
"""Operations that start no kernel: views, and memory that is not written."""


def is_dense(array: Any) -> bool:
    """Return whether an array has no gaps, in any order of its axes."""
    axes = sorted(range(array.ndim), key=array.stride, reverse=True)
    return bool(array.permute(axes).is_contiguous())


def starts(func: Any, args: tuple[Any, ...]) -> int:
    """Return the number of kernels that an operation starts on CUDA.

    Operations on lists start one for each tensor, unless all tensors are dense and of one dtype. A
    0-d factor must be of this dtype, too, and a list of factors of their shapes. A copy may convert
    one dtype to another. PyTorch takes at most 110 tensors in a launch; this is ignored, since
    newer versions take more.
    """
    import torch

    name, arrays = (
        func.overloadpacket.__name__,
        [x for x in args if isinstance(x, (torch.Tensor, list, tuple))],
    )
    # Without an array, a number becomes one.
    if not arrays or name in WITHOUT_KERNEL:
        return 0
    if not name.startswith("_foreach"):
        return 1
    first, *others = arrays
    alike = len({array.dtype for array in first}) == 1
    alike = alike and all(map(is_dense, first))
    for other in others:
        if isinstance(other, torch.Tensor):
            alike = alike and other.dtype is first[0].dtype
        elif isinstance(other[0], torch.Tensor):
            # The lists that `_foreach_copy_` takes may differ in their dtypes.
            of_one_dtype = other if name == "_foreach_copy_" else [*first, *other]
            alike = alike and len({array.dtype for array in of_one_dtype}) == 1
            alike = alike and all(x.shape == y.shape for x, y in zip(first, other, strict=True))
    return 1 if alike else len(first)


def kernels(rule: Any, leaves: int, dtype: str) -> int:
    """Return the number of kernels of a step on an accelerator, without Triton."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    count = 0

    class Kernels(TorchDispatchMode):
        """Counts the kernels of operations."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not (tensors and all(map(is_on_host, tensors))):
                count += starts(func, args)
            return func(*args, **(kwargs or {}))

    kinds = {"mixed": [torch.float32, torch.bfloat16]}.get(dtype)
    kinds = kinds or [getattr(torch, dtype)]
    grads, params = (
        [torch.ones(8, 4 + n, dtype=kinds[n % len(kinds)]) for n in range(leaves)] for _ in range(2)
    )
    if dtype == "mixed":
        # A strided tensor slows down a whole list.
        grads[0] = torch.ones(8, 8)[:, :4]
    needed = "params" in getattr(getattr(rule, "limit", None), "needs", ())
    with on_torch():
        state = rule.init(grads)
        # The first step of a process sends constants, which are kept on the device.
        rule.update(grads, state, params if needed else None)
        with Kernels():
            rule.update(grads, state, params if needed else None, in_place=True)
    return count


RULES = {
    "by_global_norm": uc.by_global_norm(1.0),
    "by_norm": uc.by_norm(1.0),
    "by_block_rms": uc.by_block_rms(0.1),
    "zclip": uc.zclip(),
    "adagc": uc.adagc(),
    "agc": uc.agc(),
    "skip": uc.by_global_norm(1.0, nonfinite="skip"),
    "by_value": uc.by_value(-0.5, 0.5),
    "autoclip": uc.autoclip(),
}


LEAVES = (2, 20, 148)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", RULES)
def test_kernels(name: str, dtype: str) -> None:
    """A step on an accelerator starts the recorded number of kernels, for each of `LEAVES`."""
    key = name if dtype == "float32" else f"{name}, {dtype}"
    judge("kernels", key, tuple(kernels(RULES[name], leaves, dtype) for leaves in LEAVES))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["by_global_norm", "skip", "zclip", "autoclip", "by_value"])
def test_one_norm_does_not_grow(name: str) -> None:
    """For one norm, the number of kernels is the same for any number of float32 leaves."""
    few, more, many = (kernels(RULES[name], leaves, "float32") for leaves in LEAVES)
    assert few == more == many


if __name__ == "__main__":  # print what is recorded of a framework
    if sys.argv[1] == "shards":
        of_all = of_shards()
    else:
        calls = cases(EAGER[sys.argv[1]][0]())
        of_all = {name: counted(*case) for name, case in calls.items()}
    print(json.dumps(of_all))  # noqa: T201
