# SPDX-License-Identifier: MIT
"""Check, on the processes of a run, that a rule finds the norms of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from uniclip._core.tree import flatten, place
from uniclip._errors import summarize
from uniclip._types import Path
from uniclip.backends.torch.dtensor import is_dtensor
from uniclip.compose import AnyRule, rules_with_norms
from uniclip.integrations import rule_for_steps
from uniclip.integrations.torch.checks import Optimizer, stepped_by
from uniclip.integrations.torch.functions import grad_of
from uniclip.integrations.torch.optimizer import Names, attach, names_of
from uniclip.integrations.torch.processes import several

_WHAT_TO_DO = (
    "plain tensors that are parts: all_reduce= the group of those with the rest, or mesh[...]",
    "copies beside them: shared=lambda path, leaf: ..., true for copies, which then count once",
    "copies whose gradients differ: average these first, as DistributedDataParallel does",
)


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
        The norm that each process finds; ``None`` also where the step is refused or there is no
        gradient.
    shares : tuple of float or None
        For each process, the norm of what it holds by itself, in float64: copies have the norm of
        the whole, and squares of those of parts add up to its square. ``None`` where ``norm`` is.
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
        lines = [f"{self.rule}: {'as' if self.ok else 'NOT as'} in one process"]
        if self.norm is not None:
            norms = ["none" if norm is None else f"{norm:.6g}" for norm in self.norms]
            found = enumerate(zip(norms, self.shares, strict=True))
            lines += [f"one process: norm {self.norm:.6g}"]
            lines += _first(
                [f"process {rank}: norm {norm}, share {share:.6g}" for rank, (norm, share) in found]
            )
        return "\n".join([*lines, *(f"- {problem}" for problem in self.problems)])


class _Leaf(NamedTuple):
    """A parameter and its gradient, dense and in main memory, in float64 or complex128."""

    path: Path
    param: Any
    grad: Any


class _Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def step(self, closure: Any = None) -> None:
        """Change nothing."""


def check_layout(
    optimizer: Optimizer,
    rule: AnyRule,
    all_reduce: Any = None,
    shared: Any = None,
    *,
    names: Names | None = None,
) -> LayoutCheck:
    """Check that a rule finds, on the processes of this run, the norms and factors of one process.

    Call it once, in every process, after ``backward`` and before the step. It gathers the gradients
    of all processes on the first one, clips them there by the rule's first step in float64, and
    compares. Neither gradients nor the optimizer are changed. A layout does not depend on the size
    of a model, so check a small one: the first process holds the plain tensors of all processes in
    main memory, and the whole of each DTensor.

    Parameters
    ----------
    optimizer, rule, all_reduce, shared, names
        As for `attach`.

    Returns
    -------
    check : LayoutCheck
        The same in all processes. ``check.ok`` tells whether everything agrees; printed, it says
        what differs. ``check.raise_if_wrong()`` raises an error.

    Raises
    ------
    TypeError, ValueError
        If ``optimizer`` is not an optimizer or ``rule`` not a rule, or if no process has a
        gradient.

    Notes
    -----
    Plain tensors do not tell whether they are parts, so it is inferred from names and values.
    Leaves of one name whose parameters are equal are copies, which count once; if their gradients
    differ they were never averaged, so their mean is taken. If the parameters differ they are parts
    of one leaf; so give the optimizer the names of the whole model. Parameters that are constant,
    such as biases of 0, look like copies even if they are parts: check after some steps.

    An optimizer that averages gradients in its own ``step``, as Horovod's does, is clipped before
    that, which no check sees: let it average first, clip by `clip_grad_norm_`, then step.

    Norms along axes of plain parts cannot be checked, which is a problem of its own. Those along an
    axis that DTensors divide are not compared, as each process has the norms of its own part.

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
    process 0: norm 1.73205, share 1.73205
    """
    groups, rule = stepped_by(optimizer, rule).groups(), rule_for_steps(rule)
    known = names_of(names, groups)
    if names is not None:
        named = [
            {"param_names": [known.get(p, n) for n, p in enumerate(group["params"])]}
            for group in groups
        ]
        # The optimizer's own first.
        groups = [names | group for names, group in zip(named, groups, strict=True)]
    alone, _ = _tried(lambda: _first_step(list(_held(groups, whole=False)), rule))
    found, refusal = _as_it_runs(groups, rule, all_reduce, shared)
    here = (list(_held(groups, whole=True)), _joint(alone), found, refusal)
    check = _of_all(here, lambda every: _compared(every, rule))
    if check is None:
        msg = (
            "no process has a gradient: call check_layout after backward, and before the step and "
            "zero_grad"
        )
        raise ValueError(msg)
    return check


def _held(groups: Any, *, whole: bool) -> Iterator[_Leaf]:
    """Yield the leaves of this process that have a gradient,
    of a DTensor the whole or the own part.
    """
    for number, group in enumerate(groups):
        names = group.get("param_names", range(len(group["params"])))
        for name, p in zip(names, group["params"], strict=True):
            if (grad := grad_of(p)) is not None:
                yield _Leaf((number, name), _dense(p, whole=whole), _dense(grad, whole=whole))


def _dense(tensor: Any, *, whole: bool) -> Any:
    """Return a tensor dense and in main memory, in float64 or complex128."""
    if is_dtensor(tensor):
        tensor = tensor.full_tensor() if whole else tensor.to_local()
    return tensor.detach().to_dense().to("cpu", torch.promote_types(tensor.dtype, torch.float64))


def _first_step(leaves: list[_Leaf], rule: Any) -> dict[str, Any]:
    """Return what the rule's first step finds in one process."""
    groups = range(1 + max(leaf.path[0] for leaf in leaves))
    params, grads = ([OrderedDict[Any, Any]() for _ in groups] for _ in range(2))
    for (group, name), param, grad in leaves:
        params[group][name], grads[group][name] = param, grad
    return _numbers(rule.update(grads, rule.init(params), params)[2])


def _numbers(report: Any) -> dict[str, Any]:
    """Return the norms and factors of a report; a joint one is called "norm" and "factor"."""
    found: dict[str, Any] = {}
    for name in ("norm", "factor"):
        leaves, spec = flatten(getattr(report, f"{name}s", None))
        for path, leaf in zip(spec.paths(), leaves, strict=True):
            if leaf is not None:
                found[place(f"{name}s", path) if path else name] = leaf.detach().to(
                    "cpu", torch.float64
                )
    return found


def _joint(numbers: dict[str, Any]) -> float | None:
    """Return the norm if there is only one, else ``None``."""
    return numbers["norm"].item() if "norm" in numbers else None


def _as_it_runs(
    groups: Any, rule: Any, all_reduce: Any, shared: Any
) -> tuple[dict[str, Any], str | None]:
    """Return what `attach` finds, on copies of the gradients, and the error if it refuses."""
    still = _Still([group | {"params": list(map(_copy, group["params"]))} for group in groups], {})
    handle, refusal = _tried(lambda: attach(still, rule, all_reduce, shared))
    if _of_all(refusal, any):  # one that refuses takes no step, and the others would wait for it
        return {}, refusal
    _, refusal = _tried(still.step)
    return {} if refusal else _numbers(handle.report), refusal


def _copy(p: Any) -> Any:
    """Return a parameter with the same values, and a gradient of its own."""
    copy = torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    copy.grad = None if p.grad is None else p.grad.detach().clone()
    copy._fsdp_flattened = getattr(p, "_fsdp_flattened", False)  # noqa: SLF001 - FSDP1's mark
    return copy


def _tried(run: Callable[[], Any]) -> Any:
    """Return the result of a function, and the error that it raises."""
    try:
        return run(), None
    except (ValueError, TypeError, FloatingPointError, RuntimeError) as error:
        # The last if another process failed.
        return {}, f"{type(error).__name__}: {error}"


def _of_all(mine: Any, make: Callable[[list[Any]], Any]) -> Any:
    """Return, in all processes, what the first one makes of what each of them has."""
    if not several():
        return make([mine])
    first = torch.distributed.get_rank() == 0
    every: Any = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(mine, every)
    made = [make(every) if first else None]
    torch.distributed.broadcast_object_list(made)
    return made[0]


def _compared(every: list[Any], rule: Any) -> LayoutCheck | None:
    """Compare what each process finds with what one with all leaves does.

    ``None`` if there is no gradient.
    """
    held, alone, found, refusals = zip(*every, strict=True)
    leaves = [leaf for some in held for leaf in some]
    if not leaves:
        return None
    wanted, failed = _tried(lambda: _first_step(_merged(leaves, rule), rule))
    norm = _joint(wanted)
    problems = [f"in one process: {failed}"] if failed else []
    problems += _first(
        [f"process {rank}: {refusal}" for rank, refusal in enumerate(refusals) if refusal]
    )
    differing = [
        f"process {rank}: {text}"
        for rank, some in enumerate(found)
        for text in _differences(some, wanted)
    ]
    problems += [*_first(differing), *_WHAT_TO_DO] if differing else []
    # 0 where nothing is held
    shares = tuple(None if norm is None else share or 0.0 for share in alone)
    return LayoutCheck(summarize(rule), norm, tuple(map(_joint, found)), shares, tuple(problems))


def _merged(leaves: list[_Leaf], rule: Any) -> list[_Leaf]:
    """Return the leaves of one process: copies are averaged, parts of one leaf laid in a row."""
    copies: dict[Any, list[_Leaf]] = {}
    for leaf in leaves:
        copies.setdefault((leaf.path, leaf.param.shape, leaf.param.numpy().tobytes()), []).append(
            leaf
        )
    parts: dict[Path, list[_Leaf]] = {}
    for some in copies.values():
        mean = torch.stack([leaf.grad for leaf in some]).mean(0)
        parts.setdefault(some[0].path, []).append(some[0]._replace(grad=mean))
    return [some[0] if len(some) == 1 else _in_a_row(some, rule) for some in parts.values()]


def _in_a_row(parts: list[_Leaf], rule: Any) -> _Leaf:
    """Return one leaf of all entries of its parts:
    norms of whole leaves do not depend on how these are laid out.
    """
    path, *both = zip(*parts, strict=True)
    if any(one.scope.axes is not None for one in rules_with_norms(rule)):
        msg = (
            f"norms along axes of {place('grads', path[0])} cannot be checked: processes have "
            "plain parts of it"
        )
        raise ValueError(msg)
    return _Leaf(path[0], *(torch.cat([one.flatten() for one in some]) for some in both))


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """Yield which numbers differ from those of one process, and by how much."""
    for name, here in found.items():
        there: Any = wanted.get(name, here)
        # Norms along an axis that DTensors divide are those of the own part; all are float32 here,
        # and float64 there.
        if there.shape == here.shape and not torch.allclose(
            here, there, rtol=1e-5, atol=0, equal_nan=True
        ):
            worst = (here - there).abs().nan_to_num(torch.inf).argmax()
            one, other = here.flatten()[worst].item(), there.flatten()[worst].item()
            yield f"{name} {one:.6g}, in one process {other:.6g}, off by {one - other:.3g}"


def _first(texts: list[str], most: int = 8) -> list[str]:
    """Return the first of some texts, and how many more there are."""
    return texts if len(texts) <= most else [*texts[:most], f"and {len(texts) - most} more"]
