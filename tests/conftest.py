"""Options and fixtures of the suite: ``--frameworks numpy,torch`` selects the frameworks of a run.

Tests of other frameworks are deselected. With ``--except numpy``, so is every test that a run of
NumPy alone has, unless its mark `beside_others` keeps it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kit.frameworks import COMPILED, EAGER, Framework, put_on
from kit.spine import without_spine

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A collection visits the millions of objects of all frameworks: by default, an eighth of the time.
gc.set_threshold(50_000, 10, 10)

pytest_plugins = ["kit.cpu"]
HERE = Path(__file__).parent
ADAPTERS = ("keras", "optax", "trainers")
"""Libraries besides the frameworks.

They are Keras, optax with Flax and Equinox, and Lightning with Accelerate and Hugging Face.
"""
APART = ("types", "libraries", "engines", "triton")
"""Names that ``all`` does not include.

``types`` takes minutes. ``libraries`` are Stable-Baselines3, TRL and timm, which clip inside.
``engines`` are DeepSpeed and Megatron.
``triton`` runs kernels in Triton's interpreter, which cannot share a process with TensorFlow.
"""
NEEDS = {
    # With the frameworks installed, mypy takes minutes.
    "typed/test_types.py": {"types"},
    "libraries/test_hydra.py": {"libraries"},
    "libraries/test_libraries.py": {"libraries"},
    "engines/test_engines.py": {"engines"},
    "test_compared.py": {"torch", "tensorflow", "keras", "jax", "optax", "mlx"},
    "test_many_leaves.py": {"jax"},
    "test_private.py": {"torch"},
    "test_processes.py": {"torch"},
    "test_triton.py": {"triton"},
    "test_sharding.py": {"jax", "optax"},
    "adapters/test_torch.py": {"torch"},
    "adapters/test_torch_contract.py": {"torch"},
    "adapters/test_torch_lists.py": {"torch"},
    "adapters/test_torch_several.py": {"torch"},
    "adapters/test_tensorflow1.py": {"tensorflow"},
    "adapters/test_optax.py": {"optax"},
    "adapters/test_keras.py": {"keras"},
    "adapters/test_accelerate.py": {"trainers"},
    "adapters/test_lightning.py": {"trainers"},
    "adapters/test_transformers.py": {"trainers"},
}
"""The libraries that a file imports; it is collected only in a run with all of them."""

BOTH_WAYS = {"test_contract.py", "test_rules.py"}
"""The files whose eager tests run with the spine and without it; test_fuzz.py says itself how."""
ONE_GRAPH = (2, 11)
"""The lowest version of PyTorch that compiles rules in one graph."""
BETWEEN_GRAPHS = "PyTorch that compiles rules between graphs"
"""What a test needs that the tests of one graph replace with later versions."""
COVERED = pytest.StashKey[int]()
"""How many tests ``--except`` leaves out."""

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    every = ",".join([*EAGER, *ADAPTERS])
    parser.addoption(
        "--frameworks", default="numpy", help=f"what this run is for, of {every}; or all"
    )
    parser.addoption(
        "--except",
        dest="covered",
        default="",
        help="frameworks of a run of its own, such as numpy: tests that it has are left out here",
    )
    parser.addoption(
        "--keras-backend", default="tensorflow", choices=["tensorflow", "jax", "torch"]
    )
    parser.addoption(
        "--device",
        default="cpu",
        help="where arrays are put, such as cuda or cuda:1; then --frameworks is torch or jax",
    )
    parser.addoption(
        "--old", help="the folder of uniclip_old, which tests/make_old.py makes, to compare with"
    )
    parser.addoption(
        "--fuzz",
        help="the seed of the drawn cases, SEED or SEED:NUMBER; that of the week by default",
    )


def chosen(config: pytest.Config) -> set[str]:
    """Return the frameworks and libraries of a run."""
    names = set(config.getoption("--frameworks").split(","))
    every = {*EAGER, *ADAPTERS}
    if unknown := names - every - {"all", *APART}:
        message = (
            f"--frameworks {unknown.pop()} is none of {', '.join(sorted(every))}, all, "
            f"{', '.join(APART)}"
        )
        raise pytest.UsageError(message)
    return every if "all" in names else names


def covered(config: pytest.Config) -> set[str]:
    """Return the frameworks whose tests another run has."""
    names = set(filter(None, config.getoption("covered").split(",")))
    if unknown := names - {*EAGER, *ADAPTERS}:
        message = f"--except {unknown.pop()} is none of {', '.join([*EAGER, *ADAPTERS])}"
        raise pytest.UsageError(message)
    return names


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and set Keras' backend before anything imports Keras."""
    config.addinivalue_line(
        "markers", "needs(*names): runs where all of these are in --frameworks, or Keras' backend"
    )
    config.addinivalue_line(
        "markers",
        "only(*names): of the frameworks of a run, or of their kinds, those that a test is for",
    )
    config.addinivalue_line("markers", "compiled: compiles, which takes long")
    config.addinivalue_line(
        "markers", "beside_others: has to hold where other frameworks are, so --except keeps it"
    )
    # Triton reads the variable when it is imported.
    if "triton" in chosen(config):
        os.environ |= {"TRITON_INTERPRET": "1", "UNICLIP_TRITON": "1"}
    os.environ["KERAS_BACKEND"] = config.getoption("--keras-backend")

    config.addinivalue_line(
        "markers", "cpu_only(why): expects what a CPU alone promises; left out on another device"
    )
    device = config.getoption("--device")
    if device == "cpu":
        return
    if len(chosen(config)) > 1 or chosen(config) - {"torch", "jax"}:
        message = f"--device {device} needs --frameworks torch or --frameworks jax"
        raise pytest.UsageError(message)
    platform = device.partition(":")[0]
    os.environ["JAX_PLATFORMS"] = platform if platform == "cpu" else f"{platform},cpu"
    put_on(device)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the files of libraries that are not part of a run."""
    name = (
        collection_path.relative_to(HERE).as_posix() if collection_path.is_relative_to(HERE) else ""
    )
    unasked = name in {
        "test_against_old.py",
        "test_spine_against_old.py",
    } and not config.getoption("--old")
    return True if unasked or NEEDS.get(name, set()) - chosen(config) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests by the run's frameworks: eager (``framework``), compiled (``compiler``).

    Those of `BOTH_WAYS` run with the spine and without it.
    """
    if metafunc.definition.path.name in BOTH_WAYS and "compiler" not in metafunc.fixturenames:
        metafunc.parametrize("_spine", [True, False], ids=["spine", "general"], indirect=True)
    for fixture, ways in (("framework", EAGER), ("compiler", COMPILED)):
        if fixture in metafunc.fixturenames:
            only = metafunc.definition.get_closest_marker("only")
            some = [
                (name, way())
                for name in ways
                if name in chosen(metafunc.config)
                for way in ways[name]
                if not only or {name, way.name} & {*only.args}
            ]
            marks = [pytest.mark.compiled] if fixture == "compiler" else []
            cases = [
                pytest.param(way, marks=[*marks, pytest.mark.needs(name)], id=way.name)
                for name, way in some
            ]
            metafunc.parametrize(
                fixture,
                cases or [pytest.param(None, marks=pytest.mark.needs("none"))],
                indirect=True,
            )


def torch_version() -> tuple[int, ...]:
    """Return the major and the minor version of PyTorch, without importing it."""
    return tuple(int(part) for part in version("torch").split(".")[:2])


def needed(item: pytest.Item) -> set[str]:
    """Return the frameworks and libraries that a test needs."""
    path = item.path
    of_file = NEEDS.get(path.relative_to(HERE).as_posix()) if path.is_relative_to(HERE) else None
    marks = {name for mark in item.iter_markers("needs") for name in mark.args}
    return marks | (of_file or set())


def check_marks(items: set[pytest.Item], frameworks: set[str]) -> None:
    """Fail if a test to leave out has a parameter of another framework, without its mark."""
    known = {way for name in frameworks for way in EAGER.get(name, ())}
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if others := [v for v in values if isinstance(v, Framework) and type(v) not in known]:
            message = f"{item.nodeid} has no mark `needs` for its parameter {others[0].name}"
            raise pytest.UsageError(message)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of frameworks that are not part of a run, and those that another run has."""
    here = {*chosen(config), f"keras on {config.getoption('--keras-backend')}"}
    if "torch" in here and torch_version() < ONE_GRAPH:
        here.add(BETWEEN_GRAPHS)
    left = {item for item in items if needed(item) - here}
    if config.getoption("--device") != "cpu":
        left |= {item for item in items if item.get_closest_marker("cpu_only")}

    elsewhere = covered(config)
    had = {
        item
        for item in items
        if needed(item) <= elsewhere and not item.get_closest_marker("beside_others")
    }
    if elsewhere:
        check_marks(had, elsewhere)
        config.stash[COVERED] = len(had - left)
        left |= had

    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of tests that another run has to the printing process."""
    if COVERED in session.config.stash and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["covered"] = session.config.stash[COVERED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the number of tests that another run has; all workers find the same."""
    if "covered" in getattr(node, "workeroutput", {}):
        node.config.stash[COVERED] = node.workeroutput["covered"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests are left to another run."""
    if COVERED in config.stash:
        others = ",".join(sorted(covered(config)))
        terminalreporter.write_line(
            f"left out: {config.stash[COVERED]} tests, which --frameworks {others} runs"
        )


@pytest.fixture(autouse=True)
def _spine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turn the spine off for the tests that ask for it."""
    with nullcontext() if getattr(request, "param", True) else without_spine():
        yield


@pytest.fixture
def framework(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Return a framework as it runs eagerly."""
    with request.param.context():
        yield request.param


@pytest.fixture
def compiler(request: pytest.FixtureRequest) -> Iterator[Framework]:
    """Return a framework as it compiles code, in the modes that it needs."""
    with request.param.context():
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    """Clear compilation caches after each file, which would grow to gigabytes."""
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@contextmanager
def quickly() -> Iterator[None]:
    """Disable most optimizations of machine code by XLA, where they take longest."""
    jax = sys.modules.get("jax")
    if jax:
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    if jax:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def _quickly() -> Iterator[None]:
    """Compile the code of a test without most optimizations."""
    with quickly():
        yield
