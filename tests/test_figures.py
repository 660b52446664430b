"""README's figures, versions, and counts of rules and cases are equal to those of their sources.

Other measurements stand in generated tables. The prose of pages has none.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import GROUPS
from kit.pages import BLOCK

pytestmark = pytest.mark.needs("numpy")
ROOT = Path(__file__).parents[1]


def read(name: str) -> str:
    """Return the text of a file, with single spaces."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def found(name: str, pattern: str) -> str:
    """Return what the only group of a pattern matches in a file, equally everywhere."""
    [value] = set(re.findall(pattern, read(name)))
    return value


def data(name: str) -> Any:
    """Return the data of a JSON file of the documentation."""
    return json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8"))


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table in a text."""
    rows = [line.split("|")[1:-1] for line in text.splitlines() if "|" in line]
    return [[cell.strip() for cell in row] for row in rows]


def tally() -> dict[str, list[str]]:
    """Return how many cases each library gets right, wrong, and so on."""
    return {name: marks for name, *marks in cells(data("compared-pages")["parts"]["tally"])[2:]}


def wrong_of(library: str) -> str:
    """Return in how many cases that apply a library is wrong, without those of negative limits."""
    cases = data("compared-pages")["parts"]["cases-limits"].split("\n\n**")
    negative = "\n".join(case for case in cases if "A negative limit" in case)
    of_negative = re.findall(rf"- \*{library}\* +(.*)", negative)
    right, wrong, error = (int(count) for count in tally()[library][:3])
    applies = right + wrong + error - sum(result != "\u2013" for result in of_negative)
    return f"{wrong - sum('✗' in result for result in of_negative)} of {applies}"


def lowest(package: str) -> str:
    """Return the lowest supported version of a package."""
    return found("pyproject.toml", rf'"{package}>=([\d.]+)["; ]')


def torch_of(environment: str) -> str:
    """Return the version of PyTorch that an environment of tox installs."""
    return found("tox.ini", rf"\[testenv:{environment}\] [^\[]*? deps = torch==([\d.]+)\.\* ")


RULES = len(re.findall(r"~uniclip\.\w", read("docs/api/presets.md")))
CASES = sum(map(len, GROUPS.values()))
RIGHT, WRONG = tally()["uniclip"][0], tally()["at least one built-in"][1]
PYTHONS = re.findall(r"Programming Language :: Python :: (3\.\d+)", read("pyproject.toml"))
MAIN_PYTHON = found(".github/workflows/tests.yml", r'python-version: "([\d.]+)"')
NEWEST_PYTHON = found("tox.ini", r"testenv:newest\] base_python = python([\d.]+)")
TORCH = found("constraints.txt", r"torch==(\d+\.\d+)")
LOWEST_TORCH, COMPILED_TORCH = lowest("torch"), torch_of("torch-2-11")


def of_readme() -> list[str]:
    """Return the README's sentences with figures."""
    libraries = "PyTorch", "TensorFlow", "Keras", "optax", "MLX"
    wrong = [f"{name} {wrong_of(name)}" for name in libraries]
    cpu, gpu = data("speed-step")["about"], data("speed-gpu")["about"]
    return [
        f"It has {RULES} published clipping rules,",
        f"in: {', '.join(wrong)}. In all five",
        f"uniclip is right in all {RIGHT}. See",
        f"CPU ({cpu['cores']} cores of an {cpu['cpu']}): time of the clipping call",
        f"GPU: GPU time, {gpu['what']}; the release has not been measured",
        f"with Python {PYTHONS[0]} or later",
        f"(Python {MAIN_PYTHON}; the tests take",
    ]


def of_contributing() -> list[str]:
    """Return the sentences with versions of the guide for contributors."""
    first, *_, last = (f"py{python.replace('.', '')}" for python in PYTHONS)
    return [
        f"with Python {PYTHONS[0]} or later",
        f"`{first}` to `{last}` on each push",
        f"# Python {NEWEST_PYTHON}, the newest versions",
        f"# PyTorch {LOWEST_TORCH}, the lowest version: eager",
        f"# PyTorch {COMPILED_TORCH}, the lowest version that compiles",
    ]


def of_versions() -> list[str]:
    """Return the rows of the page of versions."""
    first, *_, last = PYTHONS
    before_compiled = f"2.{int(COMPILED_TORCH.removeprefix('2.')) - 1}"
    kernels = read("src/uniclip/backends/torch/gpus.py").replace(", ", ".")
    [triton] = re.findall(r" _VERSIONS = \{\((\d+\.\d+)\)", kernels)
    for_gpu = dict(re.findall(r"\((\d+\.\d)\): \((\d\.\d)\)", kernels))
    run = found("pyproject.toml", r'"triton==(\d+\.\d+)\.\d+;')
    built = re.findall(r"triton==(\d+\.\d+)\.\*", read("tox.ini"))
    names = "NumPy", "array-api-compat", "optree", "TensorFlow", "JAX"
    return [
        f"| Python | {first} | {MAIN_PYTHON} on all frameworks; {first} to {last} on NumPy;",
        f"once a month, {NEWEST_PYTHON} on all frameworks |",
        *(f"| {name} | {lowest(name.lower())} |" for name in names),
        f"| PyTorch | {LOWEST_TORCH} | all tests with {TORCH};",
        f"once a month, some with {torch_of('lowest-torch')} and {COMPILED_TORCH} |",
        f"| {LOWEST_TORCH} to {before_compiled} | yes | the graph",
        f"| from {COMPILED_TORCH} | yes | in one",
        f"| {triton} | the results of the kernels with {run};",
        f"once a month, compiling them with {built[0]} to {built[-1]} |",
        f"10.0, 12.0 | {for_gpu['10.0']} |",
        f"10.3, 12.1 | {for_gpu['10.3']} |",
        f"| Thor | 11.0 | {for_gpu['11.0']} |",
    ]


def of_compared() -> list[str]:
    """Return the sentences of the comparison, with its counts and versions."""
    about = data("compared-pages")["parts"]["versions"]
    short = dict(re.findall(r"(\w+) (\d+\.\d+)\.\d", about))
    [optax] = re.findall(r"optax ([\d.]+)", about)
    return [
        f"right in all {RIGHT} cases.",
        f"is wrong, without an error, in {WRONG}. :::",
        f"The {len(GROUPS['usual'])} usual cases,",
        f"PyTorch {short['torch']}, TensorFlow {short['tensorflow']}, Keras {short['keras']}, JAX",
        f"JAX {short['jax']} with optax {optax}, MLX {short['mlx']}, timm",
    ]


SENTENCES: dict[str, Callable[[], list[str]]] = {
    "README.md": of_readme,
    "CONTRIBUTING.md": of_contributing,
    "docs/versions.md": of_versions,
    "docs/compared.md": of_compared,
    "docs/use-it-with-pytorch.md": lambda: [
        f"| case | PyTorch {TORCH} |",
        f"Stable-Baselines3 {lowest('stable-baselines3')}, TRL {lowest('trl')}, and timm",
        f"and timm {lowest('timm')} (",
    ],
    "docs/install.md": lambda: [f"uniclip needs Python {PYTHONS[0]} or later"],
    "docs/rl-and-llm.md": lambda: [f"`GRPOTrainer` of TRL {lowest('trl')};"],
    "docs/first-steps.md": lambda: [f"any of [{RULES} rules]"],
    "docs/index.md": lambda: [f"doc {RULES} rules: the figure,"],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_figures(page: str) -> None:
    """A page has its sentences, with the figures of their sources."""
    text = read(page)
    assert [sentence for sentence in SENTENCES[page]() if sentence not in text] == []


def test_the_compared_cases() -> None:
    """The recorded results of each library cover the current cases."""
    counts = tally()
    del counts["at least one built-in"]
    assert {sum(map(int, marks)) for marks in counts.values()} == {CASES}


FEATURES = {
    "Finite gradients of 1e30": "A finite gradient of 1e30",
    "bfloat16, measured in float32": "The norm of 500 bfloat16 tensors after clipping",
    "Sparse, with a row that occurs twice": "A row that occurs twice",
}
"""The rows of the table of features that one of the compared cases decides."""


@pytest.mark.parametrize("feature", FEATURES)
def test_the_features_of_libraries(feature: str) -> None:
    """The table of features has the recorded marks of the libraries, with errors as wrong."""
    page = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    table = {name: marks for name, *marks in cells(page)}
    blocks = "\n\n".join(data("compared-pages")["parts"].values())
    [results] = re.findall(
        rf"^\*\*{FEATURES[feature]}\*\*:.*\n\n((?:- .*\n?)+)", blocks, re.MULTILINE
    )
    marks = dict(re.findall(r"\*(\w+)\* +(\S+)", results.replace("error", "✗")))
    assert marks.keys() == tally().keys() - {"at least one built-in"}
    libraries = dict(zip(table[""], table[feature], strict=True))
    assert {name: libraries[name] for name in marks} == marks


def test_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README has the measured ratios of the page, and lists where uniclip is slower."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    names = [f"speed-{name}" for name in ("step", "rules", "processes", "engines", "growth", "gpu")]
    measured = {name: data(name) for name in [*names, "launches"]}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme[readme.index("- **Fast.**") : readme.index("- **Readable")]
    tables = importlib.import_module("performance_tables").parts(measured)
    assert cells(said) == cells(tables["readme"])

    rows = [row for row in data("speed-step")["rows"] if row["framework"] == "torch"]
    slow = {
        row["what"]
        for row in rows
        if any(round(row["times"][way][1], 2) < 1 for way in ("clip_grad_norm_", "attach"))
    }
    listed = re.findall(r"Slower: [^(]*\(([^)]+)\)", said)
    assert slow == {name for names in listed for name in names.split(", ")}


NUMBER = r"\d[\d.,]*[ -]?|\b(?:an?|some|half an?|one|two|three|four|five|six|ten|twenty)[ -]"
UNIT = "%|ms|µs|s|seconds|minutes?|hours?|[kMG]B|lines of code|times (?:as|faster|slower|less|more)"
MEASUREMENT = re.compile(f"(?:{NUMBER})(?:{UNIT})(?!\\w)")
"""A time, a size, a percentage, or a ratio."""


def test_prose_has_no_measurements() -> None:
    """Pages have no time, size, percentage, or ratio outside of code and generated tables."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/[!_]*/*.md")]
    for page in (ROOT / "CONTRIBUTING.md", *pages):
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        text = " ".join(re.sub(r"`[^`\n]+`|style=\S+", "", text).split())
        assert MEASUREMENT.findall(text) == [], page.name
