"""Compile the Triton kernels for NVIDIA GPUs, which needs no GPU, and check the machine code.

Run it as a script, without Triton's interpreter: ``python tests/kit/compiled.py 75 80`` for compute
capabilities 7.5 and 8.0. Those for which the installed Triton is too old are left out, and named.
"""

from __future__ import annotations

import re
import sys
from itertools import product
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uniclip.backends.torch import triton as kernels
from uniclip.backends.torch.gpus import first_version

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
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
UNREADABLE = {((3, 6), 103), ((3, 6), 121)}
"""GPUs that a version of Triton compiles for, but whose machine code its disassembler refuses."""
VOLTA = 70
"""The oldest GPUs. Some versions keep a register in memory there, or cannot read the code."""
FLOAT64 = re.compile(r"\b(D(ADD|MUL|FMA|SETP|MNMX)|[FI]2[FI]\S*F64\S*|MUFU\.\w*64H)\b")
"""Instructions of the units for float64, of which many GPUs have few: arithmetic, conversions."""
SPILL = re.compile(r"\b(STL|LDL)\b")
"""Instructions for registers that are kept in memory."""
ROUNDINGS = 12
"""How often the square of a float32 number is rounded to float32: each time by at most 2⁻²⁴, and a
root halves the error, so norms are accurate to 5e-7. With 15 they wouldn't be.
"""


class Bounds(NamedTuple):
    """The most instructions for float64 in the code of a kernel, the most registers, and the most
    instructions for registers that are kept in memory.
    """

    float64: int
    registers: int
    spills: int = 0


BOUNDS = {
    # A thread has 32 elements of a chunk, in each of three parts of the code.
    ("sum_chunks", tl.float32): Bounds(24, 64),
    ("sum_chunks", tl.bfloat16): Bounds(4, 64),
    ("sum_chunks", tl.float16): Bounds(2, 64),
    # A thread has 64 elements, of eight rows, for each pass of a loop.
    ("sum_rows", tl.float32): Bounds(40, 96),
    ("sum_rows", tl.bfloat16): Bounds(16, 80),
    ("sum_rows", tl.float16): Bounds(10, 80),
    # A thread adds up to 16 partial sums, and a root takes about 25 instructions.
    "join_sums": Bounds(24, 64),
    "join_norms": Bounds(50, 64),
    "find_norms": Bounds(110, 64),
    "find_factor": Bounds(80, 96),
    "bound_chunks": Bounds(0, 64),
    "scale_chunks": Bounds(0, 64),
    "scale_rows": Bounds(0, 104),
    # All arithmetic is in float64. Some versions keep a few registers in memory for some GPUs.
    ("sum_chunks", tl.float64): Bounds(96, 64),
    ("sum_rows", tl.float64): Bounds(192, 128, spills=8),
    ("scale_chunks", tl.float64): Bounds(80, 64),
    ("scale_rows", tl.float64): Bounds(96, 128, spills=4),
}
"""By kernel, and by dtype if that matters."""


class Code(NamedTuple):
    """The code of a kernel for a GPU, from the compiler's own to that of the machine."""

    name: str
    ttgir: str
    ptx: str
    sass: str | None
    """``None`` if Triton cannot read it."""


def has_costs(capability: int) -> bool:
    """Return whether the machine code for a compute capability is checked."""
    return capability != VOLTA and (VERSION, capability) not in UNREADABLE


def compiled(kernel: Any, capability: int, parameters: dict[str, Any], **types: Any) -> Code:
    """Return the code of a kernel for GPUs of a compute capability."""
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
    sass = str(made.asm["sass"]) if has_costs(capability) else None
    code = Code(kernel.fn.__name__, str(made.asm["ttgir"]), str(made.asm["ptx"]), sass)
    # A page of the documentation names a kernel as profilers show it.
    assert f".entry {code.name}(" in code.ptx
    return code


def check_vectors(
    code: Code, dtype: Any, parameters: dict[str, Any], *, reads: int = 1, stores: bool = True
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
    lines = code.ptx.splitlines()
    loads = [line for line in lines if "ld.global" in line and width in line]
    assert 0 < len(loads) <= most, (code.name, dtype, "loads", len(loads), most)
    written = [line for line in lines if "st.global" in line and width in line]
    assert len(written) <= most, (code.name, dtype, "stores", len(written), most)
    assert written or not stores, (code.name, dtype, "no stores")


def check_order(code: Code) -> None:
    """Require one layout for all loads of elements.

    With two layouts, sums would be added in two orders: bits would depend on the alignment.
    """
    loads = re.findall(r"tt\.load .* : tensor<\w+x!tt\.ptr<\w+>, (#\w+)>", code.ttgir)
    assert len(loads) > 1, code.name
    assert len({*loads}) == 1, (code.name, loads)


def check_roundings(code: Code, steps: int) -> None:
    """Require a group of float32 squares to be added by one warp, with few roundings.

    A square is rounded in each step of a thread, then with each other element that the thread has
    of the group, then each time that the threads of a warp add in pairs.
    """
    sums = set(re.findall(r"\}\) : \(tensor<\S*x(\d+)xf32, (#\w+)>\)", code.ttgir))
    assert len(sums) == 1, (code.name, sums)
    group, layout = sums.pop()
    last = rf"{layout} = .*sizePerThread = \[.*?(\d+)\], threadsPerWarp = \[.*?(\d+)\]"
    found = re.search(last, code.ttgir)
    assert found, (code.name, layout)
    adjacent, threads = map(int, found.groups())
    assert adjacent * threads == int(group), (code.name, found[0])
    roundings = steps + adjacent - 1 + threads.bit_length() - 1
    assert roundings == ROUNDINGS, (code.name, found[0], roundings)


def check_costs(code: Code, bounds: Bounds) -> None:
    """Require few instructions for float64 and few registers, and no register kept in memory."""
    if code.sass is None:
        return
    float64 = [line for line in code.sass.splitlines() if FLOAT64.search(line)]
    assert len(float64) <= bounds.float64, (code.name, len(float64), bounds, float64)
    registers = 1 + max(map(int, re.findall(r"\bR(\d+)", code.sass)))
    assert registers <= bounds.registers, (code.name, registers, bounds)
    spills = SPILL.findall(code.sass)
    assert len(spills) <= bounds.spills, (code.name, "registers are kept in memory", spills)


def check_sums(capability: int, dtype: Any, parameters: dict[str, Any], kernel: Any) -> None:
    """Compile and check a kernel that measures tensors."""
    code = compiled(kernel, capability, parameters)
    check_vectors(code, dtype, parameters, stores=False)
    check_order(code)
    if dtype == tl.float32:
        # `sum_rows` adds up the groups of a row after four steps.
        steps = parameters["CHUNK"] // parameters["BLOCK"] if "CHUNK" in parameters else 4
        check_roundings(code, steps)
    check_costs(code, BOUNDS[code.name, dtype])


def check_changes(
    capability: int, dtype: Any, parameters: dict[str, Any], kernel: Any, **types: Any
) -> None:
    """Compile and check a kernel that writes tensors."""
    code = compiled(kernel, capability, parameters, **types)
    check_vectors(code, dtype, parameters, reads=2 if code.name == "bound_chunks" else 1)
    bounds = BOUNDS.get((code.name, dtype), BOUNDS[code.name])
    # Float64 factors are converted: one for each of eight rows, in each of two branches.
    if dtype != tl.float64 and types.get("factors") == "*fp64":
        bounds = bounds._replace(float64=16)
    check_costs(code, bounds)


def check_dtype(capability: int, dtype: Any) -> None:
    """Compile and check all kernels that take tensors, for one dtype."""
    of_dtype = {"DTYPE": dtype}
    rows = of_dtype | kernels.ROWS_PARAMETERS
    check_sums(capability, dtype, of_dtype | kernels.SUM_PARAMETERS, kernels.sum_chunks)
    check_sums(capability, dtype, rows, kernels.sum_rows)

    chunks = of_dtype | kernels.SCALE_PARAMETERS
    # Float64 tensors are bounded by PyTorch.
    if dtype != tl.float64:
        check_changes(capability, dtype, chunks, kernels.bound_chunks)
    for zero, factors in product((True, False), ("*fp32", "*fp64")):
        of_rows = rows | {"ZERO": zero}
        check_changes(capability, dtype, of_rows, kernels.scale_rows, factors=factors)
        for one_norm in (True, False):
            of_chunks = chunks | {"ZERO": zero, "ONE_NORM": one_norm}
            check_changes(capability, dtype, of_chunks, kernels.scale_chunks, factors=factors)


def check_all(capability: int) -> None:
    """Compile and check all kernels for a compute capability."""
    for dtype in kernels.DTYPES.values():
        check_dtype(capability, dtype)
    for kernel, parameters in (
        (kernels.join_sums, kernels.JOIN_PARAMETERS),
        (kernels.join_norms, kernels.JOIN_PARAMETERS),
        (kernels.find_norms, kernels.ROOT_PARAMETERS),
        (kernels.find_factor, kernels.NORM_PARAMETERS),
    ):
        code = compiled(kernel, capability, parameters)
        check_costs(code, BOUNDS[code.name])
        assert code.name != "find_factor" or "div.rn" in code.ptx


def main(capabilities: list[int]) -> None:
    """Check the kernels for each compute capability that the installed Triton compiles for."""
    for capability in capabilities:
        first = first_version(divmod(capability, 10))
        assert first is not None, capability
        if first > VERSION:
            say(f"{capability}: left out, needs a newer Triton than {triton.__version__}")
            continue
        check_all(capability)
        say(f"{capability}: all kernels{'' if has_costs(capability) else ', costs not checked'}")


def say(line: str) -> None:
    """Print a line and flush it: a compiler may end the process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
