# SPDX-License-Identifier: MIT
"""Clipping inside training frameworks.

Each module imports its own library, and nothing here imports any.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from uniclip._errors import check, summarize
from uniclip.compose import AnyRule, Masked, as_rule, rules_with_norms, walk_rules
from uniclip.limits import Split
from uniclip.rule import BaseRule, Rule
from uniclip.scopes import each_example, each_row, everything

_package = sys.modules[__name__.partition(".")[0]]
if not hasattr(_package, "Rule"):
    _found = (
        f"the package uniclip in {', '.join(_package.__path__)} is not that of uniclip-gradients, "
        "or not all of it"
    )
    _why = (
        "the clipboard tool called uniclip writes to the same folder, and the one installed last "
        "wins"
    )
    _repair = (
        "pip uninstall uniclip; then pip install --force-reinstall --no-deps uniclip-gradients"
    )
    _msg = f"{_found}: {_why}. To repair it: {_repair}"
    raise ImportError(_msg)


def rule_for_steps(rule: AnyRule) -> BaseRule:
    """Return a rule for the gradients of an optimizer.

    A function of one gradient array becomes a rule.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If it clips the gradients of single examples, which optimizers do not get.
    """
    rule = as_rule(rule)
    # The second is uniclip.by_example_layer_norm.
    if any(
        one.scope == each_example or (one.scope == each_row and isinstance(one.limit, Split))
        for one in rules_with_norms(rule)
    ):
        msg = (
            f"{summarize(rule)} clips the gradients of single examples, and an optimizer gets those "
            "of the batch: sum them by uc.clip_and_sum before, and give that, divided by their "
            "number, to the optimizer"
        )
        raise ValueError(msg)
    return rule


def masks_and_labels(rule: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield the masks and labels inside of a rule, functions of (path, leaf),
    each after the rule that has it.
    """
    for inner in walk_rules(rule):
        if isinstance(inner, Masked):
            yield inner, inner.where
        elif isinstance(inner, Rule) and inner.scope.label not in {None, everything}:
            yield inner, inner.scope.label


def check_record(record: Any, all_reduce: Any = None) -> None:
    """Refuse an object that is not a recorder, and recording leaves that are not all in
    one process.
    """
    if record is None:
        return
    from uniclip.insight.recorder import Recorder  # noqa: PLC0415 - most runs are not recorded

    wanted = 'a recorder, such as uniclip.insight.Recorder("run.jsonl")'
    check("record", record, isinstance(record, Recorder), wanted)
    holder = None if record.holder is None else record.holder()
    if holder is not None:
        msg = f"{record!r} records {holder!r} already: give each optimizer a recorder of its own"
        raise ValueError(msg)
    if record.leaves and all_reduce is not None:
        msg = (
            "with all_reduce each process has other leaves, and one of them writes: record "
            "without leaves, or give distributed tensors, which need no all_reduce"
        )
        raise ValueError(msg)


def looks_at(what: str, rule: Any) -> bool:
    """Whether the limit of a rule, or of a rule inside it, uses ``"loss"`` or ``"params"``."""
    return any(what in one.limit.needs for one in rules_with_norms(rule))
