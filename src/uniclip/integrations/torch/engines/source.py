# SPDX-License-Identifier: MIT
"""The gradients inside of an engine, at the moment when its step begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from uniclip.rule import BaseRule

Limit: TypeAlias = tuple[Any, str]
"""An object and its attribute that has the limit of an engine's own clipping, 0 for none."""


_MISSING = object()


class Handle(Protocol):
    """The part of a `uniclip.integrations.torch.handle.Attached` that an engine uses."""

    @property
    def rule(self) -> BaseRule:
        """The rule that clips."""

    def add_hook(self, hook: ReplacedAttribute) -> None:
        """Have ``remove`` remove a hook, too."""

    def numbers(self) -> dict[str, Any]:
        """Return the state of the rule as plain numbers and lists."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""

    def expect_state(self) -> None:
        """Warn at the next step, unless a state of the rule is loaded by then."""


class ReplacedAttribute:
    """An attribute of an engine with another value, until `remove`."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._attributes = vars(owner)
        self._name = name
        self._value = value
        self._before = self._attributes.get(name, _MISSING)
        self._attributes[name] = value

    def remove(self) -> None:
        """Restore the attribute, unless another library has replaced it since."""
        if self._attributes.get(self._name) is not self._value:
            return
        del self._attributes[self._name]
        if self._before is not _MISSING:
            self._attributes[self._name] = self._before


class Part(NamedTuple):
    """What a process has of one parameter: consecutive elements of its flat form."""

    name: Any
    """Its name in the model; a number if the engine knows none."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    values: torch.Tensor
    """The weights that the engine updates, as a vector; empty if the process has none."""
    holders: int = 1
    """How many processes of the group have the same elements."""

    def leaf(self, *, is_whole: bool) -> torch.Tensor:
        """Return the values in the shape of the parameter, or with as many axes if they are a part
        of it: a mask may ask for ``ndim``.
        """
        if is_whole:
            return self.values.view(self.shape)
        return self.values.view([1] * (len(self.shape) - 1) + [-1])


class Source:
    """An optimizer of an engine: its parts of parameters, and their gradients."""

    stepped: Any
    """The object whose method is replaced."""
    method = "step"
    """The name of the method that runs after all gradients are there, and updates everything."""
    group: Any = None
    """The processes with the other parts of the parameters, ``None`` if each has whole ones."""
    limits: tuple[Limit, ...] = ()
    """Where the engine has the limits of its own clipping."""
    groups: list[list[Part]]
    """The parts of this process by parameter group, with the same names in all processes."""

    def take(self) -> list[torch.Tensor | None]:
        """Return the unscaled gradients of all parts as float32 vectors, which the engine uses."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Undo what `take` changed, such as the loss scale."""

    def has_overflowed(self) -> bool:
        """Return whether the engine will skip this step itself."""
        return False

    def skip(self) -> Any:
        """Do what the engine does in a step that it skips, and return what that step returns."""
        return None


def name_in_model(name: str) -> str:
    """Return a name without the prefixes of wrappers, such as Megatron's for 16 bits."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
