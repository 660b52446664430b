"""The form of a guarantee: a case, the behavior, and the programs and checks that test it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from kit.frameworks import Framework
from kit.trees import mapped, walk


class Program:
    """A function from arrays to arrays, run eagerly or traced with others as one program."""

    large = False
    """True if the arrays have millions of elements."""

    def applies(self, fw: Framework) -> bool:
        """Return whether the program runs on a framework."""
        return True

    def arrays(self, fw: Framework) -> Any:
        """Return the inputs: lists and dicts of arrays.

        An array may be sparse, or ``None``.
        """
        raise NotImplementedError

    def run(self, uc: Any, inputs: Any) -> Any:
        """Return lists and dicts of arrays, without reading a value.

        ``uc`` is uniclip, or a stand-in.
        """
        raise NotImplementedError

    def require(self, fw: Framework, inputs: Any, found: Any) -> None:
        """Fail if the results for the inputs are wrong."""
        raise NotImplementedError


class Repeated(Program):
    """A program that does the same with each of several inputs, so that it is traced for one."""

    def arrays(self, fw: Framework) -> list[Any]:
        """Return inputs of one structure, and of the same dtypes and shapes."""
        raise NotImplementedError

    def run(self, uc: Any, inputs: list[Any]) -> list[Any]:
        return [self.run_one(uc, one) for one in inputs]

    def run_one(self, uc: Any, one: Any) -> Any:
        """Return lists and dicts of arrays for one of the inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Promise:
    """A case, the behavior, and the programs and checks that test it."""

    case: str
    what: str
    programs: tuple[Program, ...] = ()
    check: Callable[[Framework, ModuleType], None] | None = None
    """A check that cannot be traced: errors, object identity, writes in place."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """The reason for an exemption, by framework or family."""

    def reason(self, fw: Framework | type[Framework]) -> str | None:
        """Return the reason why a framework is exempt, ``None`` if it is not."""
        return self.exceptions.get(fw.name) or self.exceptions.get(fw.family)

    def programs_for(self, fw: Framework) -> list[Program]:
        """Return the programs that run on a framework."""
        if self.reason(fw):
            return []
        return [
            program
            for program in self.programs
            if program.applies(fw) and not (program.large and fw.adds_as_another)
        ]


def is_sparse(leaf: Any) -> bool:
    """Return whether a leaf is a sparse array of its framework."""
    return bool(getattr(leaf, "is_sparse", False)) or type(leaf).__name__ in {
        "IndexedSlices",
        "BCOO",
    }


def values(fw: Framework, tree: Any) -> Any:
    """Return a tree of copies as dense NumPy arrays."""
    return mapped(
        lambda leaf: np.array(fw.dense(leaf) if is_sparse(leaf) else fw.numpy(leaf)), tree
    )


def run_eagerly(fw: Framework, uc: Any, program: Program) -> None:
    """Run a program eagerly, and require its guarantee and unchanged inputs."""
    inputs = program.arrays(fw)
    before = dict(walk(values(fw, inputs)))
    found = program.run(uc, inputs)
    after = dict(walk(values(fw, inputs)))
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array, err_msg=f"{path} was changed")
    program.require(fw, inputs, found)
