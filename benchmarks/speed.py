# SPDX-License-Identifier: MIT
"""Time uniclip beside each framework's own clipping function.

In every round each contender runs once, or as often as a short call needs, in a new order; a ratio is the median of
the rounds' ratios. Each framework has a process of its own. The documentation shows what is kept in
``docs/performance.json``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import pkgutil
import platform
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import partial
from itertools import groupby, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from many import MANY, updates
from steps import MODELS, measure
from tqdm import tqdm

import uniclip as uc
from calls import AGC, BY_NORM, EAGER, EPS, GLOBAL, RATIO, ZCLIP, to_time
from compared import norm64
from kit.frameworks import JAX, Framework, TensorFlow, Torch
from trees import CONVOLUTIONS, FIFTY, LAYERS, LSTM, MLP, RESNET, SMALL, TEN, TREES, normal
from uniclip import insight

RESULTS = Path(__file__).parent.parent / "docs" / "performance.json"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
"""What is compared is the CPU; a kept program would make the time to compile that of a later run."""
FRAMEWORKS = {"torch": Torch(), "tensorflow": TensorFlow(), "jax": JAX(), "numpy": Framework()}
NATIVE, OURS, PLAIN, TRAINING = "native", "uniclip", "not clipped", "a training step"
STEP, GROWTH = "in a step, ", "growth, "
USUAL = [RESNET, LSTM, MLP, SMALL, FIFTY, CONVOLUTIONS]
SETTINGS = {
    ("torch", EAGER): [*USUAL, ZCLIP],
    ("torch", "torch.compile"): [RESNET, MLP],
    ("tensorflow", EAGER): USUAL,
    ("tensorflow", "tf.function"): [RESNET, MLP, FIFTY],
    ("tensorflow", "tf.function, XLA"): [RESNET, MLP],
    ("jax", "jax.jit"): [*USUAL, TEN],
    ("jax", EAGER): [*USUAL, ZCLIP],
    ("numpy", EAGER): USUAL,
}
"""The gradients that are clipped in each way of calling; `ZCLIP` is a rule on those of `MLP`."""
NETS = {"small MLP": LAYERS, "wide MLP": [784, 1024, 1024, 1024, 1024, 10]}
BATCH, RATE, LIMIT = 128, 1e-6, 1e-3  # the weights hardly move, and every step is clipped
SPARSE, ZEROS = "30 leaves and a sparse one", "six leaves, one of zeros"
BRIEF, FEWEST = 5e-3, 2
"""The seconds that a short call repeats in a round; rounds of what takes many seconds."""
Leaves = list[Any]
Row = dict[str, Any]


class Contender(NamedTuple):
    """A call on gradients, and what makes them ready for each call, which is not timed."""

    call: Callable[[Leaves], Any]
    ready: Callable[[], Leaves] = list


# What is measured: each function yields rows, and `jobs` lists what is asked of it.


def clipping(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure clipping to half of the norm, then not clipping; what comes out has to have the right norm."""
    kit, (values, leaves, params, c) = FRAMEWORKS[framework], gradients(framework, what)
    calls = contenders(framework, way, what, params, c)
    for size in (1.0, 0.25) if what != ZCLIP else (0.25,):
        saved = [kit.array(v * np.float32(size)) for v in values]
        ready = partial(copied, leaves, saved) if kit.writes else partial(list, saved)
        made = {name: Contender(call, ready) for name, call in calls.items()}
        for name, contender in made.items():
            grads = contender.ready()
            out = contender.call(grads)
            norm = norm64([kit.numpy(leaf) for leaf in (out if isinstance(out, list) else grads)]) / c
            if not math.isclose(norm, min(1.0, 2 * size), rel_tol=1e-3):
                msg = f"{framework}, {way}, {what}: after {name} the norm is {norm} times the limit"
                raise ValueError(msg)
        yield {"clipped": size == 1, **row(interleaved(made, rounds))}


def gradients(framework: str, what: str) -> tuple[list[np.ndarray], Leaves, Leaves, float]:
    """Return gradients, as arrays of NumPy and of the framework, their parameters, and half of their norm.

    Every leaf has a root mean square of 0.001 and every unit is as large as its limit says, so that clipping halves
    all norms alike, whatever the rule.
    """
    kit, shapes = FRAMEWORKS[framework], TREES[MLP if what == ZCLIP else what]
    turned = what == CONVOLUTIONS and framework != "torch"  # output units last
    values = normal([shape[::-1] for shape in shapes] if turned else shapes)
    leaves, params = ([kit.array(v * np.float32(size)) for v in values] for size in (1, 0.5 / RATIO))
    if framework == "torch" and what != CONVOLUTIONS:  # whose native function wants parameters
        import torch

        params = [torch.nn.Parameter(param, requires_grad=False) for param in params]
        for param, leaf in zip(params, leaves, strict=True):
            param.grad = leaf
    return values, leaves, params, norm64(values) / 2


def contenders(framework: str, way: str, what: str, params: Leaves, c: float) -> dict[str, Any]:
    """Return the functions of gradients that are compared, the native one first."""
    rule = {FIFTY: BY_NORM, CONVOLUTIONS: AGC, ZCLIP: ZCLIP}.get(what, GLOBAL)
    c = c / math.sqrt(len(params)) if rule == BY_NORM else c
    made = {GLOBAL: uc.by_global_norm, BY_NORM: uc.by_norm, AGC: lambda _: uc.agc(RATIO, EPS), ZCLIP: lambda _: None}
    calls = to_time(framework, way, rule, c=c, rule=made[rule](c), clipper=uc.Clipper(uc.zclip()))
    return {name: compiled(framework, way, call, params) for name, call in calls.items()}


def compiled(framework: str, way: str, call: Any, params: Leaves) -> Callable[[Leaves], Any]:
    """Return a function of gradients, compiled where the way says so, that returns when its results are there."""
    if way in COMPILERS:
        place, options = COMPILERS[way]
        call = pkgutil.resolve_name(place)(call, **options)
    if framework == "jax":
        import jax

        return lambda grads: jax.block_until_ready(call(grads, params))
    return lambda grads: call(grads, params)


COMPILERS: dict[str, tuple[str, dict[str, bool]]] = {
    "torch.compile": ("torch:compile", {"fullgraph": True, "dynamic": False}),
    "tf.function": ("tensorflow:function", {"autograph": False}),
    "tf.function, XLA": ("tensorflow:function", {"autograph": False, "jit_compile": True}),
    "jax.jit": ("jax:jit", {}),
}


def copied(leaves: Leaves, saved: Leaves) -> Leaves:
    """Write what was saved into arrays that are always the same, as compilers want it."""
    for leaf, values in zip(leaves, saved, strict=True):
        leaf[...] = values
    return leaves


def stepping(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure the clip after a backward pass, and whole steps of an optimizer."""
    threads = int(way.removeprefix(STEP).split()[0])
    for title, clipped, times in measure(what, threads, rounds):
        yield {"way": f"{way}, {title}", "clipped": clipped, **row(times)}


def growing(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure many leaves in compiled code: the processor's time until a program is there, and a run of it."""
    way, (rule, shapes) = way.removeprefix(GROWTH), MANY[framework, way.removeprefix(GROWTH), what]
    grads, params = ([FRAMEWORKS[framework].array(v) for v in normal(shapes)] for _ in range(2))
    made, programs = updates(framework, way, rule, grads), {}

    def first(name: str) -> list[float]:
        update, state = made[name]
        programs[name], spent = build_program(framework, way, update, (grads, state, params))
        return spent

    first(NATIVE)  # the compiler itself has a first time, too
    times = in_turn([NATIVE, OURS], FEWEST, first)
    for stage, title in enumerate(["trace and compile", "compile"] if framework == "jax" else ["first call"]):
        yield {"way": f"{GROWTH}{way}, {title}", **row({name: spent[:, stage] for name, spent in times.items()})}
    runs = {name: Contender(lambda _, name=name: programs[name](grads, made[name][1], params)) for name in made}
    yield {"way": f"{GROWTH}{way}, a run", **row(interleaved(runs, rounds))}


def build_program(framework: str, way: str, update: Any, given: Any) -> tuple[Callable[..., Any], list[float]]:
    """Compile a function; return it, and the seconds from the start, and of the compiler alone if that is known."""
    if framework == "jax":
        import jax

        jax.clear_caches()
        start = time.process_time()
        traced = jax.jit(update).trace(*given)
        between = time.process_time()
        program = traced.lower().compile()
        end = time.process_time()
        return lambda *some: jax.block_until_ready(program(*some)), [end - start, end - between]
    if framework == "torch":
        pkgutil.resolve_name("torch.compiler:reset")()
    start = time.process_time()
    place, options = COMPILERS[way]
    program = pkgutil.resolve_name(place)(update, **options)
    program(*given)
    return program, [time.process_time() - start]


def beside(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure gradients without and with a leaf that is sparse, or that is all zeros."""
    kit, rule, sparse = FRAMEWORKS[framework], BESIDE[what], what.startswith(SPARSE)
    usual = [kit.array(v) for v in normal([(16, 16)] * (30 if sparse else 6))]
    other = kit.sparse((1000, 16), [1, 5, 5], np.ones((3, 16))) if sparse else kit.array(np.zeros((16, 16)))
    call = compiled(framework, way, lambda grads, params: uc.clip(grads, rule, params)[0], usual)
    with_it = [*usual, other] if sparse else [*usual[1:], other]
    made = {"without it": usual, "with it": with_it}
    yield row(interleaved({name: Contender(call, partial(list, grads)) for name, grads in made.items()}, rounds))


BESIDE = {
    SPARSE: uc.by_global_norm(LIMIT), f"{SPARSE}, not clipped": uc.by_global_norm(1 / LIMIT),
    f"by_norm, {ZEROS}": uc.by_norm(LIMIT), f"agc, {ZEROS}": uc.agc(),
}  # fmt: skip


def recording(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure a call of a recorder, and what it takes to write the row of a call."""
    report = uc.clip(list(map(FRAMEWORKS[framework].array, normal([(64,)] * 20))), uc.by_norm(LIMIT))[1]
    steps = 20 * rounds
    with tempfile.TemporaryDirectory() as folder, insight.Recorder(Path(folder, "run.jsonl"), steps + 1) as record:
        spent = {"a call": seconds(Contender(lambda _: record(report, loss=0.5)), steps)}
        spent["its row at a flush"] = seconds(Contender(lambda _: record.flush()), 1) / steps
    yield {"us": {name: 1e6 * s for name, s in spent.items()}, "times": {}}


def joined(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure a clip that joins norms over a process group of one, beside the bare reduction."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    grads, number, rule = list(map(torch.tensor, normal(TREES[TEN]))), torch.zeros(1), uc.by_global_norm(1.0)
    made = {
        "all_reduce": Contender(lambda _: distributed.all_reduce(number)),
        OURS: Contender(lambda _: uc.clip_(grads, rule, all_reduce=distributed.group.WORLD)),
    }
    yield row(interleaved(made, rounds))
    distributed.destroy_process_group()


def training(framework: str, way: str, what: str, rounds: int) -> Iterator[Row]:
    """Measure steps of training without clipping, clipped by the native function, and by uniclip."""
    rng, sizes = np.random.default_rng(0), NETS[what]
    x, y = rng.normal(size=(BATCH, sizes[0])).astype("f"), rng.integers(sizes[-1], size=BATCH)
    steps = {"tensorflow": keras_steps, "jax": jax_steps}[framework](sizes, x, y)
    yield row(interleaved({name: Contender(lambda _, step=step: step()) for name, step in steps}, rounds))


def keras_steps(sizes: list[int], *data: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Yield calls of ``train_on_batch`` with Adam, compiled as Keras does by itself."""
    import keras

    from uniclip.integrations.keras import ClippedOptimizer

    adam = partial(keras.optimizers.Adam, RATE)
    clipped = ClippedOptimizer(adam(), uc.by_global_norm(LIMIT))
    for name, optimizer in {PLAIN: adam(), NATIVE: adam(global_clipnorm=LIMIT), "ClippedOptimizer": clipped}.items():
        layers = [keras.layers.Dense(n, activation="relu") for n in sizes[1:-1]]
        model = keras.Sequential([keras.Input(sizes[:1]), *layers, keras.layers.Dense(sizes[-1])])
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        yield name, partial(model.train_on_batch, *data)


def jax_steps(sizes: list[int], *data: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Yield steps with Adam under ``jax.jit``, the clipping in a chain of optax."""
    import jax
    import optax

    from uniclip.integrations.optax import to_optax

    x, y = map(jax.numpy.asarray, data)
    start = [jax.numpy.asarray(w) for shape in pairwise(sizes) for w in normal([shape, shape[1:]])]

    def loss(params: Leaves) -> Any:
        out = x
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            out = jax.nn.relu(out @ weight + bias)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    def step(transform: Any, params: Leaves, state: Any) -> tuple[Leaves, Any]:
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    native, ours = optax.clip_by_global_norm(LIMIT), to_optax(uc.by_global_norm(LIMIT))
    for name, clip in {PLAIN: optax.identity(), NATIVE: native, "to_optax": ours}.items():
        transform = optax.chain(clip, optax.adam(RATE))
        held, call = [(start, transform.init(start))], jax.jit(partial(step, transform))
        yield name, lambda held=held, call=call: held.append(jax.block_until_ready(call(*held.pop())))


# How it is measured.


def row(times: dict[str, np.ndarray]) -> Row:
    """Return the median time of each contender, and how many times as fast as the first one the others are."""
    first = next(iter(times))
    ratios = {name: np.quantile(times[first] / spent, [0.25, 0.5, 0.75]).tolist() for name, spent in times.items()}
    del ratios[first]
    return {"us": {name: 1e6 * float(np.median(spent)) for name, spent in times.items()}, "times": ratios}


def interleaved(made: dict[str, Contender], rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of a call, by contender and round; what compiles does so before."""
    for contender in made.values():
        seconds(contender, FEWEST)
    numbers = {name: math.ceil(BRIEF / seconds(contender, 1)) for name, contender in made.items()}
    return in_turn(list(made), rounds, lambda name: seconds(made[name], numbers[name]))


def in_turn(names: list[str], rounds: int, spent: Callable[[str], float]) -> dict[str, np.ndarray]:
    """Measure every contender once in each round, in a new order; return the seconds by contender and round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    order, shuffle = list(times), random.Random(0).shuffle  # noqa: S311 - no secret
    gc.disable()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(spent(name))
    gc.enable()
    return {name: np.asarray(found) for name, found in times.items()}


def seconds(contender: Contender, number: int) -> float:
    """Return the mean seconds of a call; making its gradients ready is not counted."""
    spent = 0.0
    for _ in range(number):
        grads = contender.ready()
        start = time.perf_counter()
        contender.call(grads)
        spent += time.perf_counter() - start
    return spent / number


FIELDS = ("framework", "way", "what")
"""By which a row is known, beside whether something is clipped."""
Job = tuple[str, str, str, Callable[[str, str, str, int], Iterator[Row]]]


def jobs() -> Iterator[Job]:
    """Yield all that is measured: the fields, and the function that does it."""
    for (framework, way), trees in SETTINGS.items():
        yield from ((framework, way, tree, clipping) for tree in trees)
    for place in [one for one in SETTINGS if one[1] in {EAGER, "tf.function", "jax.jit"}]:
        yield from ((*place, what, beside) for what in BESIDE if ZEROS in what or place == ("torch", EAGER))
    yield from (("torch", f"{STEP}{threads} threads", what, stepping) for what in MODELS for threads in (1, 2))
    yield from ((framework, GROWTH + way, what, growing) for framework, way, what in MANY)
    for framework in ("tensorflow", "jax"):
        yield from ((framework, TRAINING, net, training) for net in NETS)
    yield "torch", EAGER, "10 leaves, a process group of one", joined
    yield from ((framework, EAGER, "insight.Recorder, 20 norms", recording) for framework in ("torch", "jax", "numpy"))


def process_of(job: Job) -> tuple[int, bool]:
    """Return what a process is for: a framework, and whether it may use one core alone."""
    return list(FRAMEWORKS).index(job[0]), job[1].startswith(GROWTH)


def use_one_core() -> None:
    """Keep this process, before it imports a framework, to one core, as far as the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])


def measured(job: Job, rounds: int) -> tuple[dict[str, Any], list[Row]]:
    """Return what the times depend on, and the rows of a job; this process imports no other framework."""
    *fields, measure = job
    rows = [{**dict(zip(FIELDS, fields, strict=True)), **found} for found in measure(*fields, rounds)]
    names = {"jax": ["jax", "optax"], "tensorflow": ["tensorflow", "keras"]}.get(job[0], [job[0]])
    versions = {name: importlib.import_module(name).__version__ for name in names}
    cpu, about = Path("/proc/cpuinfo"), {"versions": versions | {"python": platform.python_version()}}
    model = re.search(r"model name\s*: (.*)", cpu.read_text("utf-8")) if cpu.exists() else None
    machine = {"cpu": model[1] if model else platform.machine(), "cores": os.cpu_count()}
    return {**about, **machine, "date": datetime.now(timezone.utc).date().isoformat()}, rows


def save(path: Path, about: dict[str, Any], rows: list[Row]) -> None:
    """Write results, one row a line; what was measured before and not again stays."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"about": {}, "rows": []}
    found = {(*(row[field] for field in FIELDS), row.get("clipped")): row for row in [*old["rows"], *rows]}
    order = {job[:3]: number for number, job in enumerate(jobs())}
    rank = {fields: order.get((fields[0], without_stage(fields[1]), fields[2])) for fields in found}
    kept = sorted([fields for fields in found if rank[fields] is not None], key=lambda f: (rank[f], f[1], bool(f[3])))
    lines = ",\n".join(json.dumps(found[fields]) for fields in kept)
    path.write_text(f'{{"about": {json.dumps(old["about"] | about, indent=1)},\n"rows": [\n{lines}\n]}}\n', "utf-8")


def without_stage(way: str) -> str:
    """Return the way of calling of a job, of which a row may be one stage."""
    return way.rpartition(", ")[0] if way.startswith((GROWTH, STEP)) else way


def line(row: Row) -> str:
    """Return a row as a line of text."""
    clipped = {None: "", True: ", clipped", False: ", not clipped"}[row.get("clipped")]
    parts = [f"{name} {us:,.1f} µs" for name, us in row["us"].items()]
    parts += [f"{name} {ratio:.2f} ({low:.2f}-{high:.2f})" for name, (low, ratio, high) in row["times"].items()]
    return f"{', '.join(row[field] for field in FIELDS)}{clipped}: {'; '.join(parts)}"


def main() -> None:
    """Measure what is asked for, print it, and keep it for the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only rows with each of these words")
    parser.add_argument("--rounds", type=int, default=15, help="the number of rounds, 15 unless given")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"the file to keep results in, not {RESULTS.name}")
    args = parser.parse_args()
    chosen = [job for job in jobs() if all(text in ", ".join(job[:3]) for text in args.only)]
    os.environ.update(ENVIRONMENT)
    with tqdm(total=len(chosen), dynamic_ncols=True) as bar:
        for (_, growth), some in groupby(sorted(chosen, key=process_of), process_of):
            with ProcessPoolExecutor(1, get_context("spawn"), use_one_core if growth else None) as process:
                for job in some:
                    bar.set_description(", ".join(job[:3]))
                    about, rows = process.submit(measured, job, args.rounds).result()
                    bar.write("\n".join(map(line, rows)))
                    save(args.out, {job[0]: about}, rows)  # now, lest an error cost it
                    bar.update()


if __name__ == "__main__":
    main()
