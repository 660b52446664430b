"""What is said where the module of another distribution, also called uniclip, lies over this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import uniclip

OVERWRITTEN = "import uniclip\nassert uniclip.__version__ == '0.2.0'"
"""The clipboard tool was installed last: its ``__init__`` lies over ours."""
UNINSTALLED = """
import importlib.machinery, importlib.util
spec = importlib.machinery.PathFinder.find_spec("uniclip", sys.path[:1])
assert spec.origin is None
sys.modules["uniclip"] = importlib.util.module_from_spec(spec)
"""
"""The clipboard tool was uninstalled, and took our ``__init__`` with it: the folder is a namespace package."""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds modules in a folder first."""
    program = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{program}"
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package."""
    source = Path(uniclip.__file__).parent
    return Path(shutil.copytree(source, tmp_path / "uniclip", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.parametrize("found", [OVERWRITTEN, UNINSTALLED])
@pytest.mark.parametrize("module", ["uniclip.integrations", "uniclip.integrations.torch"])
def test_a_shadowed_package_says_so(package: Path, found: str, module: str) -> None:
    """The adapters, which remain, name the folder, the other distribution and the repair."""
    (package / "__init__.py").unlink()
    if found == OVERWRITTEN:
        (package / "__init__.py").write_text("__version__ = '0.2.0'\n\nfrom .main import main", encoding="utf-8")
        (package / "main.py").write_text("def main(): pass", encoding="utf-8")
    done = run(f"{found}\nimport {module}", package.parent)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith(f"ImportError: the package uniclip in {package} is not that of uniclip-gradients"), (
        done.stderr
    )
    assert "pip uninstall uniclip; then pip install --force-reinstall --no-deps uniclip-gradients" in error


def test_a_whole_package_beside_foreign_modules_works(package: Path) -> None:
    """Installed last, this package works, though modules of the other one remain beside its own."""
    (package / "main.py").write_text("raise SystemExit('not ours')", encoding="utf-8")
    program = "import numpy, uniclip, uniclip.integrations\n"
    program += "print(uniclip.__file__, uniclip.global_norm(numpy.array([3.0, 4.0])))"
    done = run(program, package.parent)
    assert done.stdout.split() == [str(package / "__init__.py"), "5.0"], done.stderr
