"""Compile the kernels of Triton for GPUs of NVIDIA, which takes no GPU: run as a script,
without the interpreter.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uniclip.backends.torch import triton as kernels

KINDS = {
    "table": "*i64",
    "addresses": "*i64",
    "groups": "*i64",
    "sums": "*fp64",
    "factors": "*fp32",
    "others": "i32",
    "count": "i32",
    "low": "fp32",
    "high": "fp32",
    "limit": "fp32",
}


def compiled(name: str, capability: int, out: str = "*fp64", **constants: Any) -> str:
    """Return the code of a kernel for GPUs of a compute capability."""
    function = getattr(kernels, name)
    warps = constants.pop("num_warps")
    kinds = {
        key: "constexpr" if key in constants else (KINDS | {"out": out})[key]
        for key in function.arg_names
    }
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, kind in enumerate(kinds.values())
        if kind.startswith("*")
    }
    held = {(function.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=function, signature=kinds, constexprs=held, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )
    return str(made.asm["ptx"])


if __name__ == "__main__":
    for kind, capability in product(
        (tl.float32, tl.bfloat16, tl.float16, tl.float64), map(int, sys.argv[1:])
    ):
        for aligned in (True, False):
            held = {"KIND": kind, "ALIGNED": aligned}
            codes = [compiled("_add_squares", capability, **held, **kernels._SUMS)]
            codes += [
                compiled("_change", capability, HOW=how, **held, **kernels._PRODUCTS)
                for how in (0, 1)
            ]
            wide = "v2" if kind is tl.float64 else "v4"  # 16 bytes
            assert all([(wide in code) == aligned for code in codes]), (kind, aligned)
        compiled("_change", capability, HOW=2, KIND=kind, ALIGNED=True, **kernels._PRODUCTS)
        compiled("_add_squares_of_rows", capability, KIND=kind, **kernels._TILE)
        for how in (0, 1):
            compiled("_change_rows", capability, HOW=how, KIND=kind, **kernels._TILE)
    for capability in map(int, sys.argv[1:]):
        compiled("_join", capability, **kernels._JOIN)
        assert "div.rn.f32" in compiled("_limit", capability, "*fp32", **kernels._ALL)
