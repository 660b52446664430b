"""The contract of all integrations: training with a rule equals the loop that clips by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import pytest

from kit.rules import Kind
from kit.rules import kinds as all_kinds
from kit.training import Arrays, Batch, ByHand, batches, loss_and_grads, overflowing, weights

LARGE = 1e38
"""Limits and thresholds above this are none; the largest number of a dtype stands for that."""
SPIKE = 3
"""The batch with the spike."""
STOP = SPIKE + 1
"""The step after which a training is saved, to be resumed."""
RESUMED = ("autoclip", "adagc")
"""Kinds of rules with a state of the joint norm, and one of each leaf's."""
KEPT = "chain"
"""The kind of rule whose files are in tests/data."""
FILES = Path(__file__).parents[1] / "data" / "files"
MOVED = ("adagc", "chain")
"""Kinds whose state has names of leaves, one of them inside a chain."""


class Adapter(Protocol):
    """A library that trains the model of `kit.training`, with a rule in uniclip's integration."""

    takes: frozenset[str]
    """The capabilities, out of

        - loss: it passes the loss to the rule;
        - scalars: `scalars` returns the values for a logger;
        - record: ``start`` takes a ``record=``, which has a row for each step after `finish`;
        - save: `save` and `load`;
        - refuse: `load` refuses the state of another rule;
        - state: `rule_state` and `load_rule_state`;
        - micro: ``start`` takes a ``micro=``, and `step` then splits the batch into so many parts,
          and clips once;
        - scale: the loss is multiplied by about 1000; a step with non-finite scaled gradients is
          skipped, so it trains without the batch with NaN;
        - rows: the gradient of the table has only the rows of the batch, so that NaN does not reach
          the others;
        - bits: unclipped steps have the bits of a training without uniclip.
    """
    optimizer: str = "momentum"
    """The optimizer of `kit.training` with the same algorithm and rate."""
    left_out: frozenset[str] = frozenset()
    """The kinds of rules that are not supported."""
    recorded: str = ""
    """The folder in tests/data/files with files that `save` once wrote, see tests/record.py."""
    own_clipping: Mapping[str, Any] = MappingProxyType({})
    """The library's own clipping options, as arguments of ``start`` that enable them."""

    def start(
        self, uc: ModuleType, rule: Any, *, record: Any = None, micro: int = 1, **options: Any
    ) -> None:
        """Start from `kit.training.weights`; without uniclip if the rule is ``None``."""

    def step(self, batch: Batch) -> None:
        """Train on a batch: forward, backward, and a step of the optimizer."""

    def weights(self) -> Arrays:
        """Return copies of the weights, by their names in `kit.training`."""

    def inner(self) -> list[np.ndarray]:
        """Return copies of the optimizer's state: moments, step counts."""

    def scalars(self) -> dict[str, float]:
        """Return the scalars of the last step for a logger."""

    def finish(self) -> None:
        """End the training, so that its record is written."""

    def save(self, folder: Path) -> None:
        """Save the training as the library's users do."""

    def load(self, folder: Path) -> None:
        """Resume from the saved files, after ``start``."""

    def rule_state(self) -> dict[str, Any]:
        """Return the state of the rule in the format of ``uc.Clipper.state_dict``.

        Names of leaves are ``['b']`` and so on.
        """

    def load_rule_state(self, saved: dict[str, Any]) -> None:
        """Load a state that ``uc.Clipper.state_dict`` returned."""


WITHOUT_NAN = ("skip", "skip_spikes", "zero")
"""Kinds of rules with which NaN reaches no weight."""


def kinds(uc: ModuleType) -> dict[str, Kind]:
    """Return a rule of each kind that does not depend on the input axis of a matrix."""
    return {**all_kinds(uc), "agc": Kind(uc.agc(0.05, axis=-1))}


Make: TypeAlias = Callable[[], Adapter]
Check: TypeAlias = Callable[[Make, ModuleType, Path], None]


def check_training(name: str, make: Make, uc: ModuleType, folder: Path, **options: Any) -> None:
    """Require every step to equal that of the loop by hand, also with a split batch.

    A skipped step changes no trained value. A step that a loss scale skips keeps the rule's state,
    too.
    """
    adapter = make()
    hand = ByHand(uc, kinds(uc)[name].rule, adapter.optimizer)
    adapter.start(uc, kinds(uc)[name].rule, **options)
    skipped, scaled = 0, "scale" in adapter.takes
    stops = options or scaled or ("rows" in adapter.takes and name not in WITHOUT_NAN)
    for number, batch in enumerate(batches()[:-2] if stops else batches()):
        if scaled and number in {0, SPIKE}:
            before, known = trained(adapter), adapter.rule_state()
            adapter.step(overflowing())
            equal(trained(adapter), before, "a step whose scaled gradients overflow")
            assert adapter.rule_state() == known, "the rule has seen a step that was left out"
        before = trained(adapter)
        adapter.step(batch)
        hand.step(batch)
        if hand.skipped:
            equal(trained(adapter), before, f"step {number}, which is skipped,")
            skipped += 1
        close(adapter.weights(), hand.weights, f"weights after step {number}")
        if "scalars" in adapter.takes:
            close_scalars(adapter.scalars(), hand.scalars(), f"step {number}")
    assert skipped or stops or name not in {"skip", "skip_spikes"}, (
        "the batches have no step to skip"
    )


def check_unclipped(make: Make, uc: ModuleType, folder: Path) -> None:
    """Require a rule that never clips to leave every bit of the training unchanged."""
    adapter, plain = make(), make()
    adapter.start(uc, uc.by_global_norm(1e9))
    plain.start(uc, None)
    for number, batch in enumerate(batches()[:STOP]):
        adapter.step(batch)
        plain.step(batch)
        equal(list(adapter.weights().values()), list(plain.weights().values()), f"step {number}")
    assert apart(plain.weights(), weights()) > 1e-3, "the adapter trains nothing"


def check_resumed(name: str, make: Make, uc: ModuleType, folder: Path) -> None:
    """Require a stopped, saved and resumed training to equal an uninterrupted one."""
    through, again = make(), make()
    for adapter in (through, again):
        adapter.start(uc, kinds(uc)[name].rule)
    for batch in batches()[:STOP]:
        through.step(batch)
    through.save(folder)
    again.load(folder)
    equal(trained(again), trained(through), "loading")
    for number, batch in enumerate(batches()[STOP:-2]):
        for adapter in (through, again):
            adapter.step(batch)
        equal(trained(again), trained(through), f"step {number} after loading")


def check_recorded(make: Make, uc: ModuleType, folder: Path) -> None:
    """Require old files to load, and the training to continue as if it had not stopped."""
    adapter = make()
    rule = kinds(uc)[KEPT].rule
    hand = ByHand(uc, rule, adapter.optimizer)
    for batch in batches()[:STOP]:
        hand.step(batch)
    adapter.start(uc, rule)
    shutil.copytree(FILES / adapter.recorded, folder, dirs_exist_ok=True)
    adapter.load(folder)
    for number, batch in enumerate(batches()[STOP:-2]):
        adapter.step(batch)
        hand.step(batch)
        close(adapter.weights(), hand.weights, f"weights {number + 1} steps after loading")


def write_files(make: Make, uc: ModuleType) -> None:
    """Write the files that `check_recorded` reads."""
    adapter = make()
    shutil.rmtree(FILES / adapter.recorded, ignore_errors=True)
    (FILES / adapter.recorded).mkdir(parents=True)
    adapter.start(uc, kinds(uc)[KEPT].rule)
    for batch in batches()[:STOP]:
        adapter.step(batch)
    adapter.save(FILES / adapter.recorded)


def check_refused(make: Make, uc: ModuleType, folder: Path) -> None:
    """Require the state of another rule to be refused, without a change to rule or optimizer."""
    saving, adapter = make(), make()
    saving.start(uc, uc.adagc())
    adapter.start(uc, uc.zclip(warmup=2))
    saving.step(batches()[0])
    for batch in batches()[:2]:
        adapter.step(batch)
    saving.save(folder)
    before = adapter.inner(), adapter.rule_state()
    with pytest.raises((ValueError, TypeError)):
        adapter.load(folder)
    equal(adapter.inner(), before[0], "a refused state")
    assert adapter.rule_state() == before[1], "a refused state has changed the rule's state"


def check_moved(name: str, make: Make, uc: ModuleType, folder: Path) -> None:
    """Require the rule's state to continue in ``uc.Clipper``, and that of a `Clipper` here."""
    adapter, again = make(), make()
    rule = kinds(uc)[name].rule
    hand = ByHand(uc, rule, adapter.optimizer)
    adapter.start(uc, rule)
    again.start(uc, rule)
    for batch in batches()[:STOP]:
        adapter.step(batch)
        hand.step(batch)
    again.load_rule_state(hand.clipper.state_dict())
    saved_by_both = adapter.rule_state(), again.rule_state()
    _, grads = loss_and_grads(hand.weights, batches()[SPIKE])
    wanted = hand.clipper(grads, hand.weights)
    assert apart(wanted, uc.Clipper(rule)(grads, hand.weights)) > 1e-3, (
        "the state has no effect here"
    )
    for saved in saved_by_both:
        clipper = uc.Clipper(rule)
        clipper.load_state_dict(saved)
        close(
            clipper(grads, hand.weights),
            wanted,
            "what a Clipper clips that goes on from the adapter",
        )


def check_own_clipping(option: str, make: Make, uc: ModuleType, folder: Path) -> None:
    """Require the library's own clipping to be refused next to a rule."""
    adapter = make()
    with pytest.raises((ValueError, TypeError)):
        adapter.start(uc, uc.by_global_norm(1.0), **{option: adapter.own_clipping[option]})


def check_record(name: str, make: Make, uc: ModuleType, folder: Path) -> None:
    """Require a record to have a row for each step, with the numbers of the loop by hand."""
    from uniclip import insight

    adapter = make()
    hand = ByHand(uc, kinds(uc)[name].rule, adapter.optimizer)
    record = insight.Recorder(folder / "run.jsonl", every=3)
    adapter.start(uc, kinds(uc)[name].rule, record=record)
    rows = []
    for batch in batches():
        adapter.step(batch)
        hand.step(batch)
        rows.append(hand.scalars())
    adapter.finish()
    found = insight.read(folder / "run.jsonl")
    np.testing.assert_array_equal(found.steps, np.arange(1, len(rows) + 1))
    shown = {
        "norm": found.norms,
        "limit": found.limits,
        "factor": found.factors,
        "skipped": found.skipped,
    }
    for field, column in shown.items():
        wanted = np.asarray([row.get(f"clip/{field}", 0.0) for row in rows])
        known = np.isfinite(found.norms) if field == "limit" else slice(None)
        wanted = np.where(wanted > LARGE, np.inf, wanted)
        np.testing.assert_allclose(column[known], wanted[known], rtol=5e-4, err_msg=field)


def contract(make: Any, some: tuple[str, ...] | None = None) -> list[Any]:
    """Return the checks of an integration as parameters of a test, for all kinds of rules or some.

    ``@pytest.mark.parametrize("check", contract(Attached))``, and the test calls ``check(Attached,
    uc, tmp_path)``.
    """
    return [pytest.param(check, id=name) for name, check in checks(make, some)]


def variants(makes: Mapping[Any, tuple[str, ...] | None]) -> list[Any]:
    """Return pairs of an integration and a check, with some kinds of rules or all."""
    return [
        pytest.param(make, check, id=f"{make.__name__}-{name}")
        for make, some in makes.items()
        for name, check in checks(make, some)
    ]


def checks(make: Any, some: tuple[str, ...] | None = None) -> Iterator[tuple[str, Check]]:
    """Yield the checks for the capabilities of an integration."""
    import uniclip as uc

    usable = [
        name
        for name, kind in kinds(uc).items()
        if name not in make.left_out
        and ("loss" in make.takes or not kind.loss)
        and (some is None or name in some)
    ]
    yield from ((f"training-{name}", partial(check_training, name)) for name in usable)
    if "bits" in make.takes:
        yield "unclipped", check_unclipped
    if "refuse" in make.takes:
        yield "refused", check_refused
    if "recorded" in vars(make):
        yield "recorded", check_recorded
    for option in make.own_clipping:
        yield f"own-{option}", partial(check_own_clipping, option)
    more: dict[str, tuple[str, Any, tuple[str, ...]]] = {
        "save": ("resumed", check_resumed, tuple(name for name in RESUMED if name in usable)),
        "state": ("moved", check_moved, tuple(name for name in MOVED if name in usable)),
        "micro": ("micro", partial(check_training, micro=2), ("autoclip",)),
        "scale": (
            "overflow",
            check_training,
            tuple(sorted({"autoclip", "by_global_norm"} - {*usable})),
        ),
        "record": ("record", check_record, ("zclip", "skip")),
    }
    for title, check, names in (more[token] for token in more if token in make.takes):
        yield from ((f"{title}-{name}", partial(check, name)) for name in names)


def trained(adapter: Adapter) -> list[np.ndarray]:
    """Return all values that a step of the optimizer changes."""
    return [*adapter.weights().values(), *adapter.inner()]


def apart(one: Arrays, other: Arrays) -> float:
    """Return the largest difference of two sets of weights."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in other)


def equal(found: list[np.ndarray], wanted: list[np.ndarray], what: str) -> None:
    """Require the same bits."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=f"{what} has changed something")


def close(found: Arrays, wanted: Arrays, what: str) -> None:
    """Require float32 weights to agree with the training by hand."""
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, rtol=2e-4, atol=2e-5, err_msg=f"{what}: {name}"
        )


def close_scalars(found: dict[str, float], wanted: dict[str, float], what: str) -> None:
    """Require the scalars for a logger to agree with the training by hand.

    The limit is compared only where the norm is finite. One that does not exist is NaN in the logs
    of trainers, and the largest number elsewhere.
    """
    assert sorted(found) == sorted(wanted), what
    for name, value in wanted.items():
        if name == "clip/limit" and not np.isfinite(wanted["clip/norm"]):
            continue
        if value > LARGE:
            assert not found[name] <= LARGE, (what, name, found[name])
        else:
            np.testing.assert_allclose(
                found[name], value, rtol=5e-4, atol=1e-6, err_msg=f"{what}: {name}"
            )
