# SPDX-License-Identifier: MIT
"""The state of an attached rule, which is saved with the state of the optimizer.

Which parameters have a row in it is in `parameters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from uniclip._errors import check, summarize
from uniclip._warnings import warn
from uniclip.backends.torch.private import STATE_DICT_HOOKS
from uniclip.clipper import Clipper
from uniclip.integrations.torch.parameters import Parameters
from uniclip.saved import labels_of, renamed, shown

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_KEY = "uniclip"
"""The key of the rule's state in a ``state_dict``."""


class RuleState:
    """The state of a rule, which follows the parameters of the optimizers."""

    def __init__(self, clipper: Clipper, params: Parameters, *, is_missing: bool) -> None:
        self._clipper = clipper
        self._params = params
        self._warns_next = False
        """Whether the next step warns that no saved state of the rule was loaded."""
        if is_missing:
            self.warn_unless_loaded()
        self._load_next: Callable[[], None] | None = None
        """Loads the state that was saved, between two hooks."""
        self._is_loaded = False
        """Whether a state was loaded since the last step, perhaps with another optimizer."""
        self.follow_parameters()

    @property
    def needs_check(self) -> bool:
        """Whether the next step must look at the state: one was loaded, or is missing."""
        return self._warns_next or self._is_loaded

    def reset(self) -> None:
        """Begin with the state before the first step."""
        params = self.follow_parameters()
        self._clipper.init(self._params.tree([p.detach() for p in params]))

    def follow_parameters(self, *, in_step: bool = False) -> list[torch.Tensor]:
        """Return the parameters; if groups have changed, give each its rows of the state."""
        params = self._params.tensors()
        if not params or not self._params.have_changed(params, in_step=in_step):
            return params

        keys = self._params.keys
        new_paths = self._moved_rows(self._params.update(params, in_step=in_step))
        # At most first steps nothing is renamed, and the state is not read from its device.
        if not new_paths and keys == self._params.keys:
            return params
        if self._clipper.state is not None:
            tree = self._params.tree([p.detach() for p in params])
            self._clipper.change_leaves(tree, new_paths)
        record = self._clipper.record
        if record is not None:
            # Names that are unique over all groups need no number of a group before them.
            names = [str(key) for _, key in self._params.paths]
            is_unique = len(set(names)) == len(names)
            record.describe(self._clipper.rule, names if is_unique else None)
        return params

    def warn_unless_loaded(self) -> None:
        """Warn at the next step, unless a state is loaded by then, or none is wanted."""
        self._warns_next = self._clipper.rule.stateful and self._clipper.resume

    def warn_if_missing(self) -> None:
        """Warn that the rule did not get its state back, once."""
        self._is_loaded = False
        if not self._warns_next:
            return
        self._warns_next = False
        msg = (
            "the optimizer resumed from a checkpoint (or already took steps), but no saved state "
            f"of {summarize(self._clipper.rule)} was found, so the rule knows only the steps since "
            "then; attach the rule first, then call optimizer.load_state_dict(saved), and save "
            "with the rule attached. With torch.distributed.checkpoint, save the handle, too: "
            '{"optimizer": ..., "clipping": handle}. To begin anew, attach with resume=False'
        )
        warn(msg)

    def save(self) -> dict[str, Any]:
        """Return the state with tensors for numbers."""
        # Groups that were added since the last step have rows in the file, too.
        self.follow_parameters()
        return self._clipper.state_dict(lambda array: torch.as_tensor(array).detach().clone())

    def numbers(self) -> dict[str, Any]:
        """Return the state as plain numbers and lists."""
        self.follow_parameters()
        return self._clipper.state_dict()

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a saved state; an empty dict resets it."""
        check("saved", saved, isinstance(saved, dict), "what state_dict() returned")
        if saved:
            load = self._prepare_load(saved)
            load()
        else:
            self.reset()
        # The optimizer may load its own part of the checkpoint after this.
        self._warns_next = False
        self._is_loaded = True

    def _prepare_load(self, saved: dict[str, Any]) -> Callable[[], None]:
        """Return a function that loads a saved state, and warns of parameters without an entry.

        A saved state with an error raises it here, before anything is loaded.
        """
        if not self._clipper.resume:
            return self.reset

        self.follow_parameters()
        if isinstance(saved, dict):
            saved = self._follow_names(saved)
        load, new = self._clipper.look_up(saved)

        def load_and_warn() -> None:
            load()
            if new:
                msg = (
                    f"the saved state of {summarize(self._clipper.rule)} has no entry for "
                    f"{shown(new)}; these parameters start with empty state"
                )
                warn(msg)

        return load_and_warn

    def _follow_names(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state with the paths that its parameters have here, whatever groups they
        were in.
        """
        new_paths = self._moved_names(labels_of(saved.get("leaves")))
        return renamed(saved, new_paths) if new_paths else saved

    def _moved_rows(self, new_paths: dict[str, str]) -> dict[str, str]:
        """Return the new paths of parameters with those of rows that a file has for others."""
        rows = self._clipper.rows
        new_paths = new_paths | self._moved_names([row for row in rows if not new_paths.get(row)])
        # A row that waits for its parameter gives its path to a parameter that is here.
        taken = set(new_paths.values()).intersection(rows) - new_paths.keys()
        return new_paths | {row: self._params.free_path(row) for row in taken}

    def _moved_names(self, saved_paths: list[str]) -> dict[str, str]:
        """Map the saved paths of parameters that are in another group here to their paths here."""
        known_paths = self._params.known_paths
        here = {_without_group(path): path for path in known_paths}
        there = {_without_group(path): path for path in saved_paths}
        counts = Counter(map(_without_group, (*known_paths, *saved_paths)))

        new_paths = {}
        for name, saved_path in there.items():
            path = here.get(name, saved_path)
            # A name that is a number, or that one side has twice, identifies no parameter.
            identifies = "'" in name and counts[name] == 2
            if identifies and path != saved_path:
                new_paths[saved_path] = path
        return new_paths

    # Hooks of an optimizer.

    def add_hooks(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
        """Save the state with that of the first optimizer, and load it with that of any; return
        what removes the hooks.
        """
        hooks = []
        for number, optimizer in enumerate(optimizers):
            if not hasattr(optimizer, STATE_DICT_HOOKS):
                continue
            if number == 0:
                hooks.append(optimizer.register_state_dict_post_hook(self._after_save))
            hooks.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
            hooks.append(optimizer.register_load_state_dict_post_hook(self._after_load))
        return hooks

    def _after_save(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the state of the rule to that of the optimizer."""
        # A run that resumes from this checkpoint finds the steps before it in the file.
        if self._clipper.record is not None:
            self._clipper.record.flush()
        if self._clipper.rule.stateful:
            state_dict[_KEY] = self.save()

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Check a saved state before the optimizer changes, which may still raise an error."""
        self._load_next = None
        if self._clipper.rule.stateful and _KEY in state_dict:
            self._load_next = self._prepare_load(state_dict[_KEY])

    def _after_load(self, _: torch.optim.Optimizer) -> None:
        """Restore the saved state, now that the optimizer has loaded the rest."""
        self._params.keep_names()
        load = self._load_next
        self._load_next = None
        if load is not None:
            self._warns_next = False
            self._is_loaded = True
            load()
        elif not self._is_loaded:
            self.warn_unless_loaded()


def saves_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.state_dict()`` runs hooks, which PyTorch's own does."""
    if not hasattr(optimizer, STATE_DICT_HOOKS):
        return False
    return getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has taken a step."""
    for state in getattr(optimizer, "state", {}).values():
        # Optimizers without a count of steps have no state before the first one.
        if isinstance(state, dict) and state.get("step", 1):
            return True
    return False


def _without_group(path: str) -> str:
    """Return what follows the number of the group in a path."""
    return path.partition("]")[2]
