# SPDX-License-Identifier: MIT
"""The state of an attached rule in the ``state_dict`` of its optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from uniclip._checks import check
from uniclip._repr import short
from uniclip._values import to_lists
from uniclip.labels import Leaves
from uniclip.saved import from_saved, restored, to_saved

_KEY = "uniclip"
"""Where a ``state_dict`` keeps the state of the rule."""
_ANEW = f"begin anew by del state_dict[{_KEY!r}] before it is loaded"
_BEGIN = "begin anew by load_state_dict({})"
ORDER = "attach the rule first, then optimizer.load_state_dict(saved), and save it with the rule attached"
"""What an error says about the order."""


class Memory:
    """What a handle remembers: its methods are hooks of the optimizer."""

    rule: Any
    state: Any
    """The state of the rule."""
    _leaves: Leaves
    _loaded: Any = None
    """The state in a state_dict that is being loaded."""
    _forgotten: bool = False
    """Whether one without a state was loaded since the last step."""

    def _save(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self.rule.memory:
            state_dict[_KEY] = self._saved(lambda array: array.detach().clone())  # torch.load loads no other classes

    def _load(self, _: Any, state_dict: dict[str, Any]) -> None:
        """Check a state; the optimizer has not changed yet, and may still find fault with the rest."""
        self._loaded = None
        if self.rule.memory and _KEY in state_dict:
            self._loaded = self._restored(state_dict[_KEY], _ANEW)

    def _take(self, _: Any) -> None:
        """Go on from what was loaded, now that the optimizer has taken the rest."""
        self._forgotten = self.rule.memory and self._loaded is None
        if self._loaded is not None:
            self.state, self._loaded = self._loaded, None

    def _warn(self) -> None:
        """Say that a rule did not get its state back; not before a step, as it may be loaded after the optimizer's."""
        if self._forgotten:
            self._forgotten = False
            msg = (
                f"the state_dict that was loaded has no state of {short(self.rule)}, which goes on with what it has "
                f"seen by itself: {ORDER}"
            )
            warnings.warn(msg, UserWarning, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers as plain numbers and lists, as `uniclip.Clipper.state_dict` does."""
        return self._saved(to_lists) if self.rule.memory else {}

    def load_state_dict(self, saved: dict[str, Any], *, anew: str = _BEGIN) -> None:
        """Go on from what was saved, by any holder and in any framework, in numbers and lists or in arrays.

        Parameters
        ----------
        saved : dict
            An empty one is a new beginning.
        anew : str
            How to begin anew, for the error if it does not fit.

        Raises
        ------
        TypeError
            If it is no dict.
        ValueError
            If it is that of another rule or of other parameters, or holds what is no finite number.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        self.state = self._restored(saved, anew) if saved else self._first()
        self._forgotten = False

    def _first(self) -> Any:
        """Return the state before the first step."""
        raise NotImplementedError

    def _saved(self, convert: Callable[[Any], Any]) -> dict[str, Any]:
        return to_saved(self.rule, self._leaves, self.state, convert)

    def _restored(self, saved: Any, anew: str) -> Any:
        return restored(from_saved(saved, self.rule, anew), self.rule, self._leaves, self.state, anew)
