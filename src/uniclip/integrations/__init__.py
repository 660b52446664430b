# SPDX-License-Identifier: MIT
"""Clipping inside training frameworks.

Each module imports its own framework. This one has what they share, and imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from uniclip._errors import check, summarize
from uniclip._types import Path
from uniclip.compose import AnyRule, Masked, as_rule, rules_with_norms, walk_rules
from uniclip.limits import Split
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import each_example, each_row, everything

if TYPE_CHECKING:
    from uniclip.insight.recorder import Recorder

_package = sys.modules[__name__.partition(".")[0]]
if not hasattr(_package, "Rule"):
    _problem = (
        f"the package uniclip in {', '.join(_package.__path__)} is not uniclip-gradients, or only "
        "a part of it"
    )
    _cause = (
        "the clipboard tool uniclip installs into the same folder, and the last installation wins"
    )
    _repair = (
        "pip uninstall uniclip; then pip install --force-reinstall --no-deps uniclip-gradients"
    )
    _msg = f"{_problem}: {_cause}. To repair it, run: {_repair}"
    raise ImportError(_msg)


def rule_for_steps(rule: AnyRule) -> BaseRule:
    """Return a rule for the gradients of an optimizer.

    A function of one gradient array becomes a rule.

    Raises
    ------
    TypeError
        If it is neither a rule nor a function.
    ValueError
        If it clips the gradients of single examples, which optimizers do not get.
    """
    rule = as_rule(rule)
    for inner in rules_with_norms(rule):
        if _clips_examples(inner):
            msg = (
                f"{summarize(rule)} clips the gradients of single examples, but an optimizer gets "
                "the gradients of the whole batch; call uc.clip_and_sum, divide the sum by the "
                "number of examples, and pass that to the optimizer"
            )
            raise ValueError(msg)
    return rule


def _clips_examples(rule: Rule) -> bool:
    """Return whether a rule clips the gradients of single examples."""
    if rule.scope == each_example:
        return True
    # uniclip.by_example_layer_norm divides one limit over the layers of each example.
    return rule.scope == each_row and isinstance(rule.limit, Split)


def masks_and_labels(
    rule: BaseRule,
) -> Iterator[tuple[Masked | Rule, Callable[[Path, Any], Any]]]:
    """Yield each mask and label function of (path, leaf) inside a rule, after its owner."""
    for inner in walk_rules(rule):
        if isinstance(inner, Masked):
            yield inner, inner.where
        elif isinstance(inner, Rule) and inner.scope.label not in {None, everything}:
            yield inner, inner.scope.label


def check_record(record: Recorder | None, all_reduce: object = None) -> None:
    """Raise if an object is not a recorder, is in use, or would record incomplete leaves."""
    if record is None:
        return
    from uniclip.insight.recorder import Recorder  # noqa: PLC0415 - most runs are not recorded

    expected = 'a recorder, such as uniclip.insight.Recorder("run.jsonl")'
    check("record", record, isinstance(record, Recorder), expected)

    owner = None if record.holder is None else record.holder()
    if owner is not None:
        msg = f"{record!r} already records {owner!r}; create a separate recorder for each optimizer"
        raise ValueError(msg)

    # Only the first process writes, and with all_reduce it has only its own leaves.
    if record.leaves and all_reduce is not None:
        msg = (
            "a recorder with leaves=True can't be combined with all_reduce, because each process "
            "has different leaves; use leaves=False, or distributed tensors, which need no "
            "all_reduce"
        )
        raise ValueError(msg)


def looks_at(argument: str, rule: BaseRule) -> bool:
    """Return whether a limit inside a rule needs ``"loss"`` or ``"params"``."""
    return any(argument in inner.limit.needs for inner in rules_with_norms(rule))
