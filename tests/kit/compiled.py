"""Compile the Triton kernels for NVIDIA GPUs, which needs no GPU.

Run it as a script, without Triton's interpreter: ``python tests/kit/compiled.py 75 80`` for compute
capabilities 7.5 and 8.0.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uniclip.backends.torch import triton as kernels

TYPES = {
    "table": "*i64",
    "norms": "*i64",
    "addresses": "*i64",
    "partial_sums": "*fp64",
    "sums": "*fp64",
    "roots": "*fp32",
    "factors": "*fp32",
    "factor_and_norm": "*fp32",
    "to_outputs": "i32",
    "count": "i32",
    "low": "fp32",
    "high": "fp32",
    "limit": "fp32",
}
"""The types of arguments; none is specialized to its value."""


def compiled(kernel: Any, capability: int, parameters: dict[str, Any], **types: Any) -> str:
    """Return the PTX of a kernel for GPUs of a compute capability."""
    constants = {key: value for key, value in parameters.items() if key != "num_warps"}
    signature = {
        name: "constexpr" if name in constants else (TYPES | types)[name]
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=places),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": parameters["num_warps"]},
    )
    ptx = str(made.asm["ptx"])
    # A page of the documentation names a kernel as profilers show it.
    assert f".entry {kernel.fn.__name__}(" in ptx
    return ptx


def check_vectors(
    ptx: str, dtype: Any, parameters: dict[str, Any], *, reads: int = 1, stores: bool = True
) -> None:
    """Require vector loads and stores of 16 bytes.

    A GPU refuses them at unaligned addresses. The code for those must have none: that would be
    twice as many instructions.
    """
    entries = parameters.get("CHUNK") or parameters["ROWS"] * parameters["COLUMNS"]
    threads = 32 * parameters["num_warps"]
    most = reads * entries * dtype.primitive_bitwidth // 8 // threads // 16
    # A vector is four registers of 32 bits, or two of 64; narrower numbers are packed into these.
    width = "v2.b64" if dtype.primitive_bitwidth == 64 else "v4.b32"
    loads = [line for line in ptx.splitlines() if "ld.global" in line and width in line]
    assert 0 < len(loads) <= most, (dtype, "loads", len(loads), most)
    written = [line for line in ptx.splitlines() if "st.global" in line and width in line]
    assert len(written) <= most, (dtype, "stores", len(written), most)
    assert written or not stores, (dtype, "no stores")


def main(capability: int) -> None:
    """Compile all kernels for a compute capability, and require vector loads."""
    for dtype in kernels.DTYPES.values():
        of_dtype = {"DTYPE": dtype}
        chunks = of_dtype | kernels.SUM_PARAMETERS
        rows = of_dtype | kernels.ROWS_PARAMETERS
        for kernel, parameters in ((kernels.sum_chunks, chunks), (kernels.sum_rows, rows)):
            ptx = compiled(kernel, capability, parameters)
            check_vectors(ptx, dtype, parameters, stores=False)

        chunks = of_dtype | kernels.SCALE_PARAMETERS
        ptx = compiled(kernels.bound_chunks, capability, chunks)
        check_vectors(ptx, dtype, chunks, reads=2)
        for zero in (True, False):
            for factors in ("*fp32", "*fp64"):
                for kernel, parameters in (
                    (kernels.scale_chunks, chunks | {"ZERO": zero}),
                    (kernels.scale_rows, rows | {"ZERO": zero}),
                ):
                    ptx = compiled(kernel, capability, parameters, factors=factors)
                    check_vectors(ptx, dtype, parameters)

    compiled(kernels.join_sums, capability, kernels.JOIN_PARAMETERS)
    compiled(kernels.join_norms, capability, kernels.JOIN_PARAMETERS)
    compiled(kernels.find_norms, capability, kernels.ROOT_PARAMETERS)
    assert "div.rn" in compiled(kernels.find_factor, capability, kernels.NORM_PARAMETERS)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(int(argument))
