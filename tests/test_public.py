"""The public interface: names, documentation, imports, and that tests use nothing else."""

from __future__ import annotations

import ast
import configparser
import functools
import graphlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import uniclip as uc
from mutants import SOURCE, find_files, places
from uniclip import config, insight, saved

pytestmark = pytest.mark.needs("numpy")
HERE, PACKAGE = Path(__file__).parent, Path(uc.__file__).parent
CHOICES = (uc.curves, uc.limits, uc.norms, uc.scopes)
ADAPTERS = ("torch", "keras", "optax", "tensorflow", "lightning", "transformers")
MODULES = ("curves", "limits", "norms", "scopes", "saved", "config", "insight", "integrations")
"""The public modules; those of `uniclip.integrations` are public, too."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=HERE
    )


# --- Names


def test_the_top_level_is_small() -> None:
    """At most 50 names are at the top level, and ``help`` shows each in the docstring."""
    names = dir(uc)
    assert len(names) <= 50
    assert set(names) == {*uc.__all__, "__version__"}
    assert not [name for name in uc.__all__ if getattr(uc, name) is None]
    classes = {"Limit", "Norm", "Report", "Scope"}
    assert uc.__doc__ is not None
    assert not [name for name in uc.__all__ if name not in uc.__doc__ and name not in classes]


def test_what_is_elsewhere() -> None:
    """A name that lives in an integration raises an AttributeError with the right module."""
    named = (
        "clip_grad_norm_",
        "attach",
        "to_optax",
        "ClippedOptimizer",
        "ClipGradients",
        "LogClipping",
        "ClippedTrainer",
    )
    for name in named:
        with pytest.raises(AttributeError, match=r"uniclip\.integrations\.(\w+)") as seen:
            getattr(uc, name)
        for module in re.findall(r"uniclip\.integrations\.(\w+)", str(seen.value)):
            source = "".join(
                path.read_text() for path in (PACKAGE / "integrations").glob(f"{module}*/*.py")
            )
            source += "".join(
                path.read_text() for path in (PACKAGE / "integrations").glob(f"{module}.py")
            )
            assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), module
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = uc.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", CHOICES, ids=lambda module: module.__name__)
def test_the_four_choices_are_four_modules(module: ModuleType) -> None:
    """Each module lists its choices only, and each choice prints as its public name."""
    assert dir(module) == sorted(module.__all__)
    objects = [name for name in module.__all__ if not callable(getattr(module, name))]
    assert [repr(getattr(module, name)) for name in objects] == [
        f"{module.__name__.replace('uniclip', 'uc')}.{name}" for name in objects
    ]
    shared = {"Limit", "Norm", "Scope"} & set(module.__all__)
    assert all(getattr(module, name) is getattr(uc, name) for name in shared)


SHOWN = {module: module.__all__ for module in (uc, *CHOICES, insight)} | {
    saved: ["to_dict", "from_dict", "renamed"],
    config: ["to_config", "from_config"],
}
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in SHOWN.items()
    for name in names
    if inspect.isroutine(getattr(module, name)) or inspect.isclass(getattr(module, name))
}
"""All public functions and classes."""
METHODS = [
    uc.Rule.init,
    uc.Rule.update,
    uc.Clipper.__call__,
    uc.Clipper.state_dict,
    uc.Clipper.load_state_dict,
]


@pytest.mark.parametrize("name", PUBLIC)
def test_documentation(name: str) -> None:
    """Every public function and class has an example, and arguments that editors can show."""
    value, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
    assert ">>>" in text
    assert text.splitlines()[0].endswith(".")
    kinds = {one.kind for one in inspect.signature(value).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds or inspect.isclass(value)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_documentation_of_methods(method: Any) -> None:
    """The methods that training loops call have their own docstrings."""
    assert inspect.getdoc(method)


# --- What importing loads


@pytest.mark.beside_others
def test_no_framework_is_imported() -> None:
    """Importing uniclip, or using it on NumPy arrays, imports no framework.

    It imports two small libraries only.
    """
    done = run(
        "import sys, numpy as np, array_api_compat, optree\nbefore = set(sys.modules)\n"
        "import uniclip as uc, uniclip.integrations\n"
        "uc.clip_by_global_norm({'w': np.ones(3), 'b': None}, "
        "1.0)\nuc.Clipper(uc.zclip())([np.ones(3)])\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = set(done.stdout.split())
    assert "uniclip" in loaded, done.stderr
    assert loaded - {"uniclip", "numpy", "array_api_compat"} <= sys.stdlib_module_names


def test_an_adapter_says_what_it_needs() -> None:
    """Without its library, an integration names the package to install."""
    done = run(
        f"import importlib, sys\nfor name in {ADAPTERS!r}:\n    sys.modules[name] = None\n"
        f"for name in {ADAPTERS!r}:\n    try:\n        "
        "importlib.import_module('uniclip.integrations.' + name)\n"
        "    except ModuleNotFoundError as error:\n        print(name, 'pip install' in str(error))"
    )
    assert done.stdout.split() == [word for name in ADAPTERS for word in (name, "True")], (
        done.stderr
    )


def test_a_copy_without_metadata_has_a_version() -> None:
    """A vendored copy has no metadata, and still has a version."""
    done = run(
        "import importlib.metadata\ndef version(name):\n    raise "
        "importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = version\nimport uniclip\nprint(uniclip.__version__)"
    )
    assert done.stdout.strip() == "0+unknown", done.stderr
    assert uc.__version__[0].isdigit()


@pytest.mark.parametrize("foreign", [True, False], ids=["overwritten", "removed"])
def test_a_package_of_the_same_name(foreign: bool, tmp_path: Path) -> None:
    """Integrations explain the repair after a clipboard tool named uniclip overwrote files."""
    package = shutil.copytree(
        PACKAGE, tmp_path / "uniclip", ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "main.py").write_text("def main(): pass", encoding="utf-8")
    find = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    # The tool overwrites this package.
    assert run(f"{find}import uniclip.integrations, uniclip\nuniclip.Rule").returncode == 0
    (package / "__init__.py").unlink()
    if foreign:
        (package / "__init__.py").write_text("from .main import main", encoding="utf-8")
    else:
        # An editable install would take precedence over a folder without an __init__.
        find += (
            "import importlib.machinery, importlib.util\n"
            "spec = importlib.machinery.PathFinder.find_spec('uniclip', sys.path[:1])\n"
            "sys.modules['uniclip'] = importlib.util.module_from_spec(spec)\n"
        )
    done = run(f"{find}import uniclip.integrations.torch")
    assert "ImportError" in done.stderr
    assert "pip install --force-reinstall --no-deps uniclip-gradients" in done.stderr


# --- The suite itself: only public names, and no test that cannot fail


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each file of the suite."""
    files = [file.relative_to(HERE) for file in HERE.rglob("*.py")]
    return {str(file): (HERE / file).read_text("utf-8") for file in files if file.parts[0] != "old"}


def private() -> list[str]:
    """Return the private modules of the package by the names that a program imports."""
    paths = [file.relative_to(PACKAGE).with_suffix("").parts for file in PACKAGE.rglob("*.py")]
    names = {".".join(part for part in parts if part != "__init__") for parts in paths} - {""}
    known = {*MODULES, *(f"integrations.{name}" for name in ADAPTERS)}
    return sorted(f"uniclip.{name}" for name in names - known)


def imported(text: str) -> set[str]:
    """Return the modules that a file imports, and the names that it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                node.module,
                *(f"{node.module}.{one.name}" for one in node.names if node.module == "uniclip"),
            }
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found


INSIDE = {"kit/compiled.py", "kit/devices.py", "test_private.py"}
"""What compiles GPU kernels, stands for a GPU, or takes private names of PyTorch away, for which
there are no public names.
"""


def test_no_modules_import_each_other() -> None:
    """Modules have an order in which each imports earlier ones only, even for types."""
    root = Path(uc.__file__).parent
    paths = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path

    imported: dict[str, set[str]] = {}
    for name, path in paths.items():
        modules = imported.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module) in paths:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    modules.add(module if module in paths else str(node.module))
    assert sum(map(len, imported.values())) > len(imported)
    # It raises an error that names the modules of a circle.
    graphlib.TopologicalSorter(imported).prepare()


def test_the_suite_uses_public_names() -> None:
    """No file uses private modules or attributes, or patches the package."""
    hidden = private()
    assert {"uniclip.rule", "uniclip.limits.base"} & set(hidden)
    named = [one for one in hidden if one.rpartition(".")[2] not in insight.__all__]
    patches = r"setattr\(\W?(uc|uniclip)\b|patch\(\W?uniclip"
    pattern = re.compile(
        rf"\b({'|'.join(map(re.escape, named))})\b|\b(uc|uniclip)(\.\w+)*\._[a-z]|{patches}"
    )
    wrong = {file: sorted(imported(text) & set(hidden)) for file, text in sources().items()}
    for file, text in sources().items():
        wrong[file] += (
            [match[0] for match in pattern.finditer(text)] if file != Path(__file__).name else []
        )
    assert {file: found for file, found in wrong.items() if found and file not in INSIDE} == {}


def calls(function: ast.AST) -> set[str]:
    """Return the names of the functions that a function calls or refers to."""
    nodes = list(ast.walk(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {
        n.attr for n in nodes if isinstance(n, ast.Attribute)
    }


def test_no_test_passes_for_nothing() -> None:
    """Each test asserts something, itself or in its callees.

    None begins with ``if ...: return``.
    """
    trees = {file: ast.parse(text) for file, text in sources().items()}
    functions = [
        (file, n)
        for file, tree in trees.items()
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef)
    ]
    uses = {name: set[str]() for _, function in functions for name in [function.name]}
    firm = {"raises", "warns", "fail"}
    for _, function in functions:
        uses[function.name] |= calls(function)
        firm |= (
            {function.name}
            if any(isinstance(node, ast.Assert) for node in ast.walk(function))
            else set()
        )
    while more := {
        name for name, used in uses.items() if name not in firm and (used & firm or _of_numpy(used))
    }:
        firm |= more
    tests = [(file, function) for file, function in functions if function.name.startswith("test")]
    assert [f"{file}: {test.name}" for file, test in tests if test.name not in firm] == []
    early = [
        (file, test, node) for file, test in tests for node in test.body if isinstance(node, ast.If)
    ]
    assert [
        f"{file}: {test.name}" for file, test, node in early if isinstance(node.body[0], ast.Return)
    ] == []


def _of_numpy(names: set[str]) -> bool:
    """Return whether one of the functions is an assertion of NumPy or PyTorch."""
    return any(name.startswith("assert_") for name in names)


def test_faults_are_planted_in_the_core() -> None:
    """The environment that plants faults covers the core, but no integrations or messages."""
    settings = configparser.ConfigParser()
    settings.read(HERE.parent / "tox.ini", encoding="utf-8")
    words = settings["testenv:mutants"]["commands"].split()
    skipped = words[words.index("--skip") + 1 : words.index("{posargs}")]
    files = find_files([""], skipped)
    paths = {
        file.relative_to(SOURCE / "uniclip").as_posix() for file in files if list(places(file))
    }
    assert paths >= {
        "_core/step.py",
        "_core/measure.py",
        "_core/apply.py",
        "rule.py",
        "compose.py",
        "limits/base.py",
    }
    assert not paths & {
        "_errors.py",
        "__init__.py",
        "backends/torch/__init__.py",
        "backends/jax.py",
    }


def test_commits_are_looked_at_by_the_linter_of_the_matrix() -> None:
    """The pre-commit hook has the linter version that tox installs."""
    root = Path(__file__).parents[1]
    [hook] = re.findall(
        r"rev: v(.+)", (root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    )
    assert f'"ruff=={hook}"' in (root / "pyproject.toml").read_text(encoding="utf-8")
