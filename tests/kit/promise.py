"""What a promise is: a case, what happens, and the programs and checks that fail if it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from kit.frameworks import Framework
from kit.trees import mapped, walk


class Program:
    """Something that makes arrays of arrays: it runs eagerly,
    or is traced together with others as one program.
    """

    large = False
    """Whether it has millions of entries."""

    def applies(self, fw: Framework) -> bool:
        """Whether there is something to run on a framework."""
        return True

    def arrays(self, fw: Framework) -> Any:
        """Return what it is run on: lists and dicts of arrays.

        An array may be sparse, or ``None``.
        """
        raise NotImplementedError

    def run(self, uc: Any, given: Any) -> Any:
        """Return lists and dicts of arrays, without asking for a value.

        ``uc`` is uniclip, or what stands for it.
        """
        raise NotImplementedError

    def require(self, fw: Framework, given: Any, found: Any) -> None:
        """Fail if what was found for the arrays is wrong."""
        raise NotImplementedError


@dataclass(frozen=True)
class Promise:
    """A case, what happens, and what fails if it does not happen."""

    case: str
    what: str
    programs: tuple[Program, ...] = ()
    check: Callable[[Framework, ModuleType], None] | None = None
    """What cannot be traced: errors, the very same objects, writing in place."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """The reason why it cannot hold, by framework or family."""

    def reason(self, fw: Framework | type[Framework]) -> str | None:
        """Return why the promise cannot hold there, ``None`` where it does."""
        return self.exceptions.get(fw.name) or self.exceptions.get(fw.family)

    def programs_for(self, fw: Framework) -> list[Program]:
        """Return the programs that a framework can run."""
        if self.reason(fw):
            return []
        return [
            program
            for program in self.programs
            if program.applies(fw) and not (program.large and fw.adds_as_another)
        ]


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf is a sparse array of its framework."""
    return bool(getattr(leaf, "is_sparse", False)) or type(leaf).__name__ in {
        "IndexedSlices",
        "BCOO",
    }


def values(fw: Framework, tree: Any) -> Any:
    """Return a tree of copies as NumPy's dense arrays."""
    return mapped(
        lambda leaf: np.array(fw.dense(leaf) if is_sparse(leaf) else fw.numpy(leaf)), tree
    )


def run_eagerly(fw: Framework, uc: Any, program: Program) -> None:
    """Run a program line by line, and require what it promises.

    What it was given has not changed.
    """
    given = program.arrays(fw)
    before = dict(walk(values(fw, given)))
    found = program.run(uc, given)
    after = dict(walk(values(fw, given)))
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array, err_msg=f"{path} was changed")
    program.require(fw, given, found)
