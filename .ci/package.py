# SPDX-License-Identifier: MIT
"""Check the sdist and the wheel in a folder, install the wheel,
run tests and the README's commands from the sdist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["--frameworks", "numpy", "tests/test_contract.py", "tests/test_faults.py"]
FOR_TOX = [
    ".ci/package.py",
    "constraints.txt",
    "constraints-lowest.txt",
    "pyproject.toml",
    "README.md",
    "tox.ini",
]
URLS = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def require(found: object, problem: str) -> None:
    """Stop with a problem where something is missing, or is none."""
    if not found:
        sys.exit(f"package: {problem}")


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    files = list(folder.glob(pattern))
    require(len(files) == 1, f"{len(files)} files {pattern} in {folder}, not one")
    return files[0]


def files_of(folder: Path) -> set[str]:
    """Return the paths of the files in a folder of the tree,
    without what Python and the documentation made.
    """
    made = ("__pycache__", "_build", "_generated", "generated")
    paths = (path.relative_to(ROOT) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not set(made) & set(path.parts)}


def check_wheel(wheel: Path) -> None:
    """Compare the files of the wheel with the package: all of it, its types too,
    and nothing else.
    """
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {name.removeprefix("src/") for name in files_of(ROOT / "src")}
    require(package == expected, f"the wheel and src/ differ in {sorted(package ^ expected)}")
    require("uniclip/py.typed" in package, "the wheel has no py.typed")
    require(
        [name for name in names if name.endswith("licenses/LICENSE")], "the wheel has no license"
    )
    print(f"package: {wheel.name}: {len(package)} files, {wheel.stat().st_size // 1024} KiB")


def check_metadata(wheel: Path) -> None:
    """Check the links of the README as PyPI shows it, the project's addresses,
    and the lowest versions.
    """
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(archive.read(name).decode("utf-8"))
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    require(urls.keys() == URLS, f"the addresses are {sorted(urls)}, not {sorted(URLS)}")
    check_links(metadata.get_payload(), urls["Source"], metadata["Version"])
    check_lowest(metadata)
    check_version(metadata["Version"])


def check_links(readme: str, source: str, version: str) -> None:
    """Check that every link is whole, and that those to this repository lead to a file of
    this version.
    """
    links = re.findall(r"\]\(([^)]+)\)", readme) + re.findall(r'src(?:set)?="([^"]+)"', readme)
    raw = source.replace("//github.com", "//raw.githubusercontent.com")
    ours = [link for link in links if link.startswith((source, raw))]
    require(len(ours) > 10, "the README has lost its links")  # noqa: PLR2004 - it has about twenty
    for link in links:
        require(
            link.startswith("https://"), f"the README links to {link}, which PyPI does not find"
        )
    for link in ours:
        path = (
            link.removeprefix(f"{raw}/v{version}/")
            .removeprefix(f"{source}/blob/v{version}/")
            .partition("#")[0]
        )
        require((ROOT / path).is_file(), f"the README links to {link}, and there is no such file")


def check_lowest(metadata: Message) -> None:
    """Compare the lowest versions that are declared with those that are tested."""
    needed = [
        one.replace(">=", "==")
        for one in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in one
    ]
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tested = [line for line in lines if line and not line.startswith(("#", "-c"))]
    require(
        sorted(needed) == sorted(tested),
        f"pyproject.toml has {needed}, constraints-lowest.txt {tested}",
    )


def check_version(version: str) -> None:
    """Check that the version stands wherever it is written by hand."""
    require(
        f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        f"no {version} in CHANGELOG.md",
    )
    require(
        f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8"),
        "CITATION.cff is older",
    )


def check_names() -> None:
    """Check that nothing tells a reader to install the distribution of the same name as
    the module.
    """
    stranger = re.compile(r"pip install[^\n]*?[\s\"']uniclip(?![-\w])|uniclip\[")
    for name in [
        "README.md",
        *(name for part in ("docs", "examples", "src") for name in files_of(ROOT / part)),
    ]:
        if name.endswith((".md", ".py")):
            found = stranger.search((ROOT / name).read_text(encoding="utf-8"))
            require(not found, f"{name} installs a clipboard tool: {found and found[0]}")


def run_from(sdist: Path, wheel: Path) -> None:
    """Install the wheel, and run tests from the unpacked sdist, which has all that tox needs."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    # One of the same version, too.
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        root = Path(folder) / sdist.name.removesuffix(".tar.gz")
        for part in ("src", "tests", "docs", "examples", "benchmarks"):
            there = {
                path.relative_to(root).as_posix()
                for path in (root / part).rglob("*")
                if path.is_file()
            }
            require(
                there == files_of(ROOT / part),
                f"the sdist and the tree differ in {there ^ files_of(ROOT / part)}",
            )
        missing = [name for name in FOR_TOX if not (root / name).is_file()]
        require(not missing, f"the sdist has no {missing}")
        print(
            f"package: {sdist.name}: {sdist.stat().st_size // 1024} KiB; tests from it:", flush=True
        )
        subprocess.run([sys.executable, "-m", "pytest", "-n", "2", *TESTS], cwd=root, check=True)
        run_commands(root, Path(folder, "env"))


def run_commands(root: Path, environment: Path) -> None:
    """Run the README's commands as they stand there, in a new environment,
    but for the one that runs all tests.
    """
    venv.create(environment, with_pip=True)
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    readme = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", readme)
    commands = [block for language, block in blocks if not language and "tox" not in block]
    require(len(commands) == 2, f"the README has {len(commands)} commands, not 2")  # noqa: PLR2004 - install, and try it
    for command in commands:
        print(f"package: {command.strip()}", flush=True)
        subprocess.run(command, shell=True, cwd=root, env={**os.environ, "PATH": path}, check=True)  # noqa: S602 - ours


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    check_wheel(only(dist, "*.whl"))
    check_metadata(only(dist, "*.whl"))
    check_names()
    run_from(only(dist, "*.tar.gz"), only(dist, "*.whl"))
