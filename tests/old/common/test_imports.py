"""What importing and using uniclip loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import uniclip

NOT_TENSORFLOW = ("backends/torch", "backends/jax", "backends/dtensor", "integrations/torch", "insight")
FRAMEWORKS = {"torch", "tensorflow", "jax", "keras", "mlx", "dask", "array_api_strict"}

USE = """
import numpy as np, uniclip as uc
uc.clip_by_global_norm({"w": np.ones(3), "b": None}, 1.0)
uc.clip_by_value([np.ones(3)], -1, 1)
"""


@pytest.mark.everywhere
@pytest.mark.parametrize("code", ["import uniclip", USE])
def test_no_framework_is_imported(code: str) -> None:
    """Neither importing uniclip nor using it on NumPy arrays imports a framework."""
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & FRAMEWORKS
    assert {"numpy", "uniclip"} <= loaded


@pytest.mark.everywhere
def test_importing_loads_little() -> None:
    """Importing uniclip loads its own modules, and none beyond those that NumPy and two small libraries need."""
    code = "import sys, numpy, array_api_compat, optree\nbefore = set(sys.modules)\nimport uniclip\n"
    code += "print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    others = {name.partition(".")[0] for name in loaded} - {"uniclip", "numpy", "array_api_compat"}
    assert others <= sys.stdlib_module_names
    assert not [name for name in loaded if name.startswith(("uniclip.integrations", "uniclip.backends.t"))]
    assert len(loaded) <= 52, sorted(loaded)


def test_the_algorithm_names_no_framework() -> None:
    """Frameworks are named in backends/ and integrations/ only, but for JAX's nodes, errors, and NumPy's numbers."""
    named = re.compile("numpy|torch|tensorflow|jax|keras|optax|flax|mlx|dask", re.IGNORECASE)
    allowed = {
        name: {"numpy"}
        for name in (
            "step.py",
            "ask.py",
            "agree.py",
            "processes.py",
            "layout.py",
            "measure.py",
            "ruler.py",
            "scale.py",
            "rules.py",
            "base.py",
            "fixed.py",
            "percentiles.py",
            "leaves.py",
        )
    } | {
        "__init__.py": {"numpy", "torch", "tensorflow", "jax", "keras", "optax"},
        "tree.py": {"numpy", "torch", "tensorflow", "jax", "flax"},
        "_mistakes.py": {"optax", "flax", "torch", "tensorflow", "keras"},
        "saved.py": {"numpy"},
        "labels.py": {"numpy"},
        "_values.py": {"numpy"},
        "config.py": {"numpy"},
    }
    root = Path(uniclip.__file__).parent
    files = [f for f in sorted(root.rglob("*.py")) if f.relative_to(root).parts[0] not in {"backends", "integrations"}]
    assert {"step.py", "rules.py", "scopes.py", "norms.py", "fixed.py", "zscores.py", "curves.py"} <= {
        f.name for f in files
    }
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.parent.name == "presets" or file.name == "verbs.py":  # whose docstrings say where things come from
            text = re.sub('""".*?"""', "", text, flags=re.DOTALL)
        found = {name.lower() for name in named.findall(text)}
        usual = {"numpy"} if file.parent.name == "insight" else set()  # which works on what was read
        assert found <= allowed.get(file.name, usual), file


def test_autograph_can_convert_the_algorithm() -> None:
    """No statement in it is one that tf.function warns about: an else of a loop, ``:=``, an annotation in a branch."""
    root, found = Path(uniclip.__file__).parent, set[str]()
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        functions = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
        for node in [part for function in functions for part in ast.walk(function)]:
            loop, branch = isinstance(node, (ast.For, ast.While)), isinstance(node, (ast.For, ast.While, ast.If))
            of_else = loop and node.orelse
            annotated = branch and any(isinstance(part, ast.AnnAssign) for part in ast.walk(node))
            if (of_else or annotated or isinstance(node, ast.NamedExpr)) and not name.startswith(NOT_TENSORFLOW):
                found.add(f"{name}:{node.lineno}")
    assert not found


NEEDED = {
    "torch": ("torch", "PyTorch: pip install torch"),
    "keras": ("keras", "Keras 3: pip install keras"),
    "optax": ("optax", "optax: pip install optax"),
    "tensorflow": ("tensorflow", "TensorFlow: pip install tensorflow"),
    "lightning": ("lightning", "Lightning: pip install lightning"),
    "transformers": ("transformers", "Hugging Face transformers: pip install 'transformers[torch]'"),
}


@pytest.mark.parametrize("module", NEEDED)
def test_an_adapter_says_what_it_needs(module: str) -> None:
    """The package of the adapters imports no library, and an adapter without its own names what to install."""
    library, needed = NEEDED[module]
    program = (
        f"import sys, uniclip.integrations\nassert not {FRAMEWORKS} & set(sys.modules)\n"
        f"sys.modules[{library!r}] = None\nimport uniclip.integrations.{module}"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert f"this part of uniclip needs {needed}" in done.stderr


@pytest.mark.parametrize(
    "broken", ["raise importlib.metadata.PackageNotFoundError(name)", "return None", "raise KeyError"]
)
def test_a_copy_without_metadata_has_a_version(broken: str) -> None:
    """A copy among the files of another package has no metadata; asking for its version is no error."""
    program = (
        f"import importlib.metadata\ndef version(name):\n    {broken}\nimportlib.metadata.version = version\n"
        "import uniclip\nprint(uniclip.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "0+unknown"
    assert uniclip.__version__[0].isdigit()
