# SPDX-License-Identifier: MIT
"""The state of an attached rule in the ``state_dict`` of its optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from uniclip._checks import check
from uniclip._repr import short
from uniclip._values import to_lists
from uniclip.backends.dtensor import is_dtensor
from uniclip.integrations.torch.checks import steps_of
from uniclip.labels import Leaves
from uniclip.saved import from_saved, restored, to_saved

if TYPE_CHECKING:
    from uniclip.insight import Recorder

_KEY = "uniclip"
"""The key of the rule's state in a ``state_dict``."""
_ANEW = f"start over with del state_dict[{_KEY!r}] before it is loaded"
_BEGIN = "start over with load_state_dict({})"
ORDER = "attach the rule first, then optimizer.load_state_dict(saved), and save it with the rule attached"
"""The hint about the order in an error."""
_BESIDE = 'torch.distributed.checkpoint saves it beside them: {"optimizer": ..., "clipping": handle}'
"""The hint for functions that omit it from the state of an optimizer."""
_LARGE = 2**16
"""The largest array saved as a list; making and pickling longer lists takes minutes, a tensor takes a second."""


class Memory:
    """The memory of a handle; its methods are hooks of the optimizer."""

    rule: Any
    record: Recorder | None
    """The recorder of the steps, if any."""
    state: Any
    """The state of the rule."""
    _optimizer: Any
    _leaves: Leaves
    _loaded: Any = None
    """The state in a state_dict that is being loaded."""
    _given: bool = False
    """Whether a state was loaded since the last step."""
    _forgotten: bool = False
    """Whether a state_dict without one was loaded since then, and no separate state."""
    _seen: bool = False
    """Whether the rule has run in a step."""
    _count: float = 0.0
    """The optimizer's count of steps before that."""

    def _save(self, _: Any, state_dict: dict[str, Any]) -> None:
        if self.record is not None:
            self.record.flush()
        if self.rule.memory:
            state_dict[_KEY] = self._saved(lambda array: array.detach().clone())  # torch.load loads no other classes

    def _load(self, _: Any, state_dict: dict[str, Any]) -> None:
        """Check a state, before the optimizer changes, which may still refuse the rest."""
        self._loaded = None
        if self.rule.memory and _KEY in state_dict:
            self._loaded = self._restored(state_dict[_KEY], _ANEW)

    def _take(self, _: Any) -> None:
        """Restore the loaded state, now that the optimizer has accepted the rest."""
        if self._loaded is not None:
            self.state, self._loaded, self._given = self._loaded, None, True
        self._forgotten = self.rule.memory and not self._given

    def _watch(self) -> None:
        """Note the optimizer's count of steps before the rule's first step."""
        if self.rule.memory and not self._seen:
            self._count = steps_of(self._optimizer)

    def _warn(self) -> None:
        """Warn that a rule did not get its state back; at a step, as it may be loaded after the optimizer's."""
        new = self.rule.memory and not (self._seen or self._given or self._forgotten)
        missed = new and steps_of(self._optimizer, free=True) > self._count
        forgotten, self._forgotten, self._given, self._seen = self._forgotten, False, False, True
        rule = short(self.rule) if forgotten or missed else ""
        if forgotten:
            msg = (
                f"the state_dict that was loaded has no state of {rule}, which goes on with what it has "
                f"seen by itself: {ORDER}; {_BESIDE}"
            )
            warnings.warn(msg, UserWarning, stacklevel=5)
        if missed:
            msg = f"the optimizer goes on from another state than it began with, and {rule} has seen nothing: {_BESIDE}"
            warnings.warn(msg, UserWarning, stacklevel=5)

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's memory, in the format of `uniclip.Clipper.state_dict`, but with large arrays as tensors.

        Arrays of up to 65,536 numbers are lists or numbers. The handle is a ``Stateful`` of
        ``torch.distributed.checkpoint``: ``dcp.save({"model": ..., "optimizer": ..., "clipping": handle})``.

        Returns
        -------
        dict
            Empty for a rule without memory.
        """
        return self._saved(partial(_plain, large=_LARGE)) if self.rule.memory else {}

    def numbers(self) -> dict[str, Any]:
        """Return the same as `state_dict` as plain numbers and lists, whatever their number, for JSON."""
        return self._saved(_plain) if self.rule.memory else {}

    def load_state_dict(self, saved: dict[str, Any], *, anew: str = _BEGIN) -> None:
        """Restore a memory saved by any integration and framework, as numbers and lists or as arrays.

        Parameters
        ----------
        saved : dict
            An empty dict starts over.
        anew : str
            How to start over, for the error if it does not fit.

        Raises
        ------
        TypeError
            If ``saved`` is not a dict.
        ValueError
            If it belongs to another rule or other parameters, or holds anything but finite numbers.
        """
        check("saved", saved, isinstance(saved, dict), "what a state_dict() returned")
        self.state = self._restored(saved, anew) if saved else self._first()
        self._forgotten, self._given = False, True

    def _first(self) -> Any:
        """Return the state before the first step."""
        raise NotImplementedError

    def _saved(self, convert: Callable[[Any], Any]) -> dict[str, Any]:
        return to_saved(self.rule, self._leaves, self.state, convert)

    def _restored(self, saved: Any, anew: str) -> Any:
        return restored(from_saved(saved, self.rule, anew), self.rule, self._leaves, self.state, anew)


def _plain(array: Any, large: float = math.inf) -> Any:
    """Return a tensor as numbers, or as a new tensor if it is large."""
    if array.numel() > large:
        return array.detach().clone()
    return to_lists(array.full_tensor() if is_dtensor(array) else array)
