# SPDX-License-Identifier: MIT
"""Check, on the processes of a run, that a rule finds the norms of one process.

This is for a small model, once: it gathers all gradients in the first process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from uniclip._core.collectives import AllReduce, Shared
from uniclip._core.containers import expression_of, flatten
from uniclip._errors import summarize
from uniclip._types import Path, T
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.compose import AnyRule, rules_with_norms
from uniclip.integrations import rule_for_steps
from uniclip.integrations.torch.attaching import attach
from uniclip.integrations.torch.checks import Optimizers, optimizers_of
from uniclip.integrations.torch.engines import engine_of
from uniclip.integrations.torch.functions import grad_of
from uniclip.integrations.torch.parameters import Names, ParamGroup, params_in, read_names
from uniclip.integrations.torch.processes import FSDP1_MARKS, several
from uniclip.report import Report
from uniclip.rule import BaseRule

_WHAT_TO_DO = (
    "regular tensors that are shards: pass all_reduce=, the group of the others, or mesh[...]",
    "replicas among them: pass shared=lambda path, leaf: ..., true for replicas, which count once",
    "replicas whose gradients differ: average these first, as DistributedDataParallel does",
)
_SHOWN = 8
"""How many processes and numbers are printed."""

Numbers: TypeAlias = dict[str, torch.Tensor]
"""The norms and factors of a step, by what they are called in the printed text."""

R = TypeVar("R")


@dataclass(frozen=True)
class LayoutCheck:
    """The result of `check_layout`.

    Printed, it says which norms differ, by how much, and what to do.

    Attributes
    ----------
    rule : str
        The rule.
    norm : float or None
        The norm that one process would find, in float64; ``None`` for a rule with several norms or
        none.
    norms : tuple of float or None
        The norm that each process finds; ``None`` also if its step raises an error or there is no
        gradient.
    shares : tuple of float or None
        The local norm of each process, that of the gradients it holds, in float64: replicas have
        the norm of the whole, and squares of those of shards add up to its square. ``None`` if
        ``norm`` is.
    problems : tuple of str
        What is wrong (of processes and numbers the first eight), and what to do.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import check_layout
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> check = check_layout(torch.optim.SGD([("w", w)]), uc.by_global_norm(1.0))
    >>> check.ok, check.norm, check.norms, check.shares, check.problems
    (True, 5.0, (5.0,), (5.0,), ())
    """

    rule: str
    norm: float | None
    norms: tuple[float | None, ...]
    shares: tuple[float | None, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether norms and factors are those of one process."""
        return not self.problems

    def raise_if_wrong(self) -> None:
        """Raise the printed text as an error, if something is wrong.

        Raises
        ------
        ValueError
            If ``ok`` is false.
        """
        if not self.ok:
            raise ValueError(str(self))

    def __str__(self) -> str:
        """Return the norms, what is wrong, and what to do."""
        verdict = "as" if self.ok else "NOT as"
        lines = [f"{self.rule}: {verdict} in one process"]

        # A rule with several norms has too many to list.
        if self.norm is not None:
            lines.append(f"one process: norm {self.norm:.6g}")
            by_rank = []
            for rank, (norm, local) in enumerate(zip(self.norms, self.shares, strict=True)):
                found = "none" if norm is None else f"{norm:.6g}"
                by_rank.append(f"process {rank}: norm {found}, local norm {local:.6g}")
            lines += _first(by_rank)

        lines += [f"- {problem}" for problem in self.problems]
        return "\n".join(lines)


class _Leaf(NamedTuple):
    """A parameter and its gradient, dense and in main memory, in float64 or complex128."""

    path: Path
    param: torch.Tensor
    grad: torch.Tensor


class _Finding(NamedTuple):
    """What one process has and finds; every process sends one to the first."""

    leaves: list[_Leaf]
    """Its parameters and gradients, of a DTensor the whole."""
    local_norm: float | None
    """The norm of what it holds, of a DTensor the own shard."""
    numbers: Numbers
    """The norms and factors that `attach` finds; empty if it raises an error."""
    error: str | None
    """The error that `attach` or its step raises."""


class _NoStep(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def step(self, closure: object = None) -> None:
        """Change nothing."""


def check_layout(
    optimizer: Optimizers,
    rule: AnyRule,
    all_reduce: AllReduce | None = None,
    shared: Shared | None = None,
    *,
    names: Names | None = None,
) -> LayoutCheck:
    """Check that a rule finds, on the processes of this run, the norms and factors of one process.

    Call it once, in every process, after ``backward`` and before the step. It gathers the gradients
    of all processes on the first one, clips them there by the rule's first step in float64, and
    compares. Neither gradients nor the optimizer are changed. A layout does not depend on the size
    of a model, so check a small one: the first process holds the regular tensors of all processes
    in main memory, and the whole of each DTensor.

    Parameters
    ----------
    optimizer, rule, all_reduce, shared, names
        As for `attach`.

    Returns
    -------
    check : LayoutCheck
        The same in all processes. ``check.ok`` tells whether everything agrees; printed, it shows
        what differs. ``check.raise_if_wrong()`` raises an error.

    Raises
    ------
    TypeError, ValueError
        If ``optimizer`` is not an optimizer or ``rule`` not a rule, or if no process has a
        gradient; for an engine, such as DeepSpeed's.

    Notes
    -----
    Whether regular tensors (not DTensors) are shards is inferred from names and values. Leaves of
    one name whose parameters are equal are replicas, which count once; if their gradients differ
    they were never averaged, so their mean is taken. If the parameters differ they are shards of
    one leaf; so give the optimizer the names of the whole model. Parameters that are constant, such
    as biases of 0, look like replicas even if they are shards: check after some steps.

    An optimizer that averages gradients in its own ``step``, as Horovod's does, is clipped before
    that, which no check sees: let it average first, clip by `clip_grad_norm_`, then step.

    Norms along axes of regular tensors that are shards cannot be checked, which the result lists as
    a problem. Those along an axis that DTensors divide are not compared, as each process has the
    norms of its own shard.

    Examples
    --------
    >>> import torch
    >>> from uniclip.integrations.torch import check_layout
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.named_parameters())
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> print(check_layout(optimizer, uc.by_global_norm(1.0)))
    uc.by_global_norm(1.0): as in one process
    one process: norm 1.73205
    process 0: norm 1.73205, local norm 1.73205
    """
    engine = engine_of(optimizer, names)
    if engine is not None:
        msg = (
            f"check_layout can't look into {engine.kind}, which has parts of the gradients in flat "
            "buffers; train a small model with it and in one process, and compare the weights"
        )
        raise ValueError(msg)
    groups = [group for one in optimizers_of(optimizer, rule) for group in one.param_groups]
    rule = rule_for_steps(rule)
    if names is not None:
        groups = _with_names(groups, names)

    local, _ = _try(lambda: _take_first_step(_leaves_of(groups, whole=False), rule))
    numbers, error = _take_attached_step(groups, rule, all_reduce, shared)
    # To gather a DTensor all processes take part, so each gets the whole.
    leaves = _leaves_of(groups, whole=True)

    finding = _Finding(leaves, _joint_norm(local or {}), numbers, error)
    check = _on_first_process(finding, lambda findings: _compare(findings, rule))
    if check is None:
        msg = (
            "no process has a gradient; call check_layout after backward, and before the step and "
            "zero_grad"
        )
        raise ValueError(msg)
    return check


def _with_names(groups: list[ParamGroup], names: Names) -> list[ParamGroup]:
    """Return groups with the names of their parameters; the optimizer's names come first."""
    names_by_id = read_names(names, params_in(groups))()
    named = []
    for group in groups:
        keys = [names_by_id.get(id(p), number) for number, p in enumerate(group["params"])]
        named.append({"param_names": keys} | group)
    return named


def _leaves_of(groups: list[ParamGroup], *, whole: bool) -> list[_Leaf]:
    """Return the leaves of this process that have a gradient, of a DTensor the whole or the own
    shard.
    """
    leaves = []
    for number, group in enumerate(groups):
        names = group.get("param_names", range(len(group["params"])))
        for name, p in zip(names, group["params"], strict=True):
            grad = grad_of(p)
            if grad is not None:
                path = (number, name)
                leaves.append(_Leaf(path, _dense(p, whole=whole), _dense(grad, whole=whole)))
    return leaves


def _dense(tensor: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Return a tensor dense and in main memory, in float64 or complex128."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor() if whole else tensor.to_local()
    wide = torch.promote_types(tensor.dtype, torch.float64)
    return tensor.detach().to_dense().to("cpu", wide)


def _take_first_step(leaves: list[_Leaf], rule: BaseRule) -> Numbers:
    """Return what the rule's first step finds in one process."""
    number_of_groups = 1 + max(leaf.path[0] for leaf in leaves)
    params: list[OrderedDict[str, torch.Tensor]] = [OrderedDict() for _ in range(number_of_groups)]
    grads: list[OrderedDict[str, torch.Tensor]] = [OrderedDict() for _ in range(number_of_groups)]
    for leaf in leaves:
        group, name = leaf.path
        params[group][name] = leaf.param
        grads[group][name] = leaf.grad

    _, _, report = rule.update(grads, rule.init(params), params)
    return _numbers_of(report)


def _numbers_of(report: Report | None) -> Numbers:
    """Return the norms and factors of a report, none without one.

    A joint one is called "norm" and "factor".
    """
    numbers: Numbers = {}
    for name in ("norm", "factor"):
        leaves, spec = flatten(getattr(report, f"{name}s", None))
        for path, leaf in zip(spec.paths(), leaves, strict=True):
            if leaf is None:
                continue
            key = expression_of(f"{name}s", path) if path else name
            numbers[key] = leaf.detach().to("cpu", torch.float64)
    return numbers


def _joint_norm(numbers: Numbers) -> float | None:
    """Return the norm if there is only one, else ``None``."""
    if "norm" not in numbers:
        return None
    return float(numbers["norm"].item())


def _take_attached_step(
    groups: list[ParamGroup], rule: BaseRule, all_reduce: AllReduce | None, shared: Shared | None
) -> tuple[Numbers, str | None]:
    """Return what `attach` finds on copies of the gradients, and the error that it raises."""
    # The step clips the gradients of these in place, and changes nothing else.
    copies = [group | {"params": list(map(_copy, group["params"]))} for group in groups]
    optimizer = _NoStep(copies, {})
    handle, error = _try(lambda: attach(optimizer, rule, all_reduce, shared))

    # A process with an error takes no step, and the others would wait for it.
    if _on_first_process(error, any) or handle is None:
        return {}, error
    _, error = _try(optimizer.step)
    if error is not None:
        return {}, error
    return _numbers_of(handle.report), None


def _copy(p: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the same values, and a copy of the gradient."""
    copy = torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    if p.grad is not None:
        copy.grad = p.grad.detach().clone()
    for mark in FSDP1_MARKS:
        if hasattr(p, mark):
            setattr(copy, mark, getattr(p, mark))
    return copy


def _try(run: Callable[[], R]) -> tuple[R | None, str | None]:
    """Return the result of a function, and the text of the error that it raises.

    The errors are those of uniclip, and a ``RuntimeError`` of PyTorch if another process failed.
    """
    try:
        return run(), None
    except (ValueError, TypeError, FloatingPointError, RuntimeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _on_first_process(own: T, make: Callable[[list[T]], R]) -> R:
    """Return in all processes what the first one makes of what each of them has."""
    if not several():
        return make([own])

    # The first one alone needs the memory for what all of them have.
    is_first = torch.distributed.get_rank() == 0
    gathered: list[T] | None = None
    if is_first:
        gathered = [own] * torch.distributed.get_world_size()
    torch.distributed.gather_object(own, gathered)

    # The other processes have a place for what they receive.
    made: list[Any] = [None]
    if gathered is not None:
        made = [make(gathered)]
    torch.distributed.broadcast_object_list(made)
    received: R = made[0]
    return received


def _compare(findings: list[_Finding], rule: BaseRule) -> LayoutCheck | None:
    """Compare what each process finds with what one with all leaves does.

    ``None`` if there is no gradient.
    """
    leaves = [leaf for finding in findings for leaf in finding.leaves]
    if not leaves:
        return None

    found, error = _try(lambda: _take_first_step(_merge(leaves, rule), rule))
    numbers = found or {}
    problems = []
    if error is not None:
        problems.append(f"in one process: {error}")

    # Of a run with many processes the first few problems tell enough.
    errors = []
    differing = []
    for rank, finding in enumerate(findings):
        if finding.error is not None:
            errors.append(f"process {rank}: {finding.error}")
        differing += [f"process {rank}: {text}" for text in _differences(finding.numbers, numbers)]
    problems += _first(errors)
    if differing:
        problems += [*_first(differing), *_WHAT_TO_DO]

    norm = _joint_norm(numbers)
    norms = tuple(_joint_norm(finding.numbers) for finding in findings)
    local_norms: list[float | None] = [None] * len(findings)
    if norm is not None:
        # A process without gradients has the norm 0.
        local_norms = [finding.local_norm or 0.0 for finding in findings]
    return LayoutCheck(summarize(rule), norm, norms, tuple(local_norms), tuple(problems))


def _merge(leaves: list[_Leaf], rule: BaseRule) -> list[_Leaf]:
    """Return the leaves of one process: replicas are averaged, shards of one leaf concatenated."""
    replicas: dict[Hashable, list[_Leaf]] = {}
    for leaf in leaves:
        # Bytes can be hashed, and NaN in a parameter equals itself there.
        key = (leaf.path, leaf.param.shape, leaf.param.numpy().tobytes())
        replicas.setdefault(key, []).append(leaf)

    # What differs under one name are shards of one leaf.
    shards: dict[Path, list[_Leaf]] = {}
    for same in replicas.values():
        # Gradients of replicas differ if nothing has averaged them yet.
        mean = torch.stack([leaf.grad for leaf in same]).mean(0)
        shards.setdefault(same[0].path, []).append(same[0]._replace(grad=mean))
    return [_concatenate(of_leaf, rule) for of_leaf in shards.values()]


def _concatenate(shards: list[_Leaf], rule: BaseRule) -> _Leaf:
    """Return one leaf of all elements of its shards: norms of whole leaves do not depend on how
    these are laid out.
    """
    path = shards[0].path
    if len(shards) == 1:
        return shards[0]
    if any(inner.scope.axes is not None for inner in rules_with_norms(rule)):
        msg = (
            f"norms along axes of {expression_of('grads', path)} cannot be checked, since "
            "processes have shards of it as regular tensors"
        )
        raise ValueError(msg)

    param = torch.cat([shard.param.flatten() for shard in shards])
    grad = torch.cat([shard.grad.flatten() for shard in shards])
    return _Leaf(path, param, grad)


def _differences(numbers: Numbers, in_one_process: Numbers) -> Iterator[str]:
    """Yield which numbers differ from those of one process, and by how much."""
    for name, here in numbers.items():
        there = in_one_process.get(name, here)
        # Norms along an axis that DTensors divide are those of the own shard.
        if there.shape != here.shape:
            continue
        # Those of the run are float32, those of one process float64.
        if torch.allclose(here, there, rtol=1e-5, atol=0, equal_nan=True):
            continue

        # A difference of NaN is the worst one.
        worst = (here - there).abs().nan_to_num(torch.inf).argmax()
        found = here.flatten()[worst].item()
        wanted = there.flatten()[worst].item()
        yield f"{name} {found:.6g}, in one process {wanted:.6g}, off by {found - wanted:.3g}"


def _first(texts: list[str]) -> list[str]:
    """Return the first of some texts, and how many more there are."""
    if len(texts) <= _SHOWN:
        return texts
    return [*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more"]
