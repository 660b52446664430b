"""Plant faults in copies of uniclip, and see whether the fuzz finds them: ``python tests/fuzz.py --planted``."""
# ruff: noqa: T201 - a script prints

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src" / "uniclip"
FAULTS: dict[str, tuple[str, str, str]] = {
    "a leaf is left out of the norm": (
        "backends/numpy.py",
        "return squares(arrays, lengths)",
        "return squares([0 * arrays[0], *arrays[1:]], lengths)",
    ),
    "integers become float32": ("layout.py", "xp.asarray(1.0).dtype)", "xp.float32)"),
    "a window is one too short": (
        "limits/percentiles.py",
        "xp.where(state.count < self.window, state.count + 1, self.window)",
        "xp.where(state.count < self.window - 1, state.count + 1, self.window - 1)",
    ),
    "a warm-up is one too long": (
        "limits/zscores.py",
        "known = steps > self.warmup",
        "known = steps > self.warmup + 1",
    ),
    "a memory takes NaN in": ("step.py", "return new if bool(finite) else old", "return new"),
    "the policy zero lets ∞ through": (
        "backends/arrays.py",
        "xp.where(xp.isfinite(array), array, 0.0)",
        "xp.where(xp.isnan(array), 0.0, array)",
    ),
    "imaginary parts do not count": ("norms.py", "xp.real(x) ** 2 + xp.imag(x) ** 2", "xp.real(x) ** 2"),
    "the given arrays are changed": (
        "backends/numpy.py",
        "list(map(mul, arrays, factors))",
        "[np.multiply(a, f, out=a if a.flags.writeable else None) for a, f in zip(arrays, factors, strict=True)]",
    ),
    "averages learn from norms before clipping": (
        "limits/averages.py",
        "(1 - self.decay) * left)",
        "(1 - self.decay) * norms)",
    ),
    "rows are taken for columns": ("scopes.py", "return tuple(range(1, ndim))", "return tuple(range(ndim - 1))"),
    "a norm as large as its limit is skipped": (
        "curves.py",
        "xp.astype(norm <= limit, norm.dtype)",
        "xp.astype(norm < limit, norm.dtype)",
    ),
    "the least norm of parameters is 0": (
        "limits/fixed.py",
        "xp.where(w > self.eps, w, self.eps)",
        "w",
    ),
}
"""What is wrong; and where which text becomes which. The text has to be there exactly once."""


def planted(folder: Path, fault: str | None) -> Path:
    """Return a folder to import a copy of uniclip from, with a fault in it."""
    shutil.copytree(SOURCE, folder / "uniclip", ignore=shutil.ignore_patterns("__pycache__"))
    if fault:
        name, old, new = FAULTS[fault]
        file = folder / "uniclip" / name
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            message = f"{fault!r} cannot be planted: {old!r} is {text.count(old)} times in {name}, not once"
            raise ValueError(message)
        file.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def failing(fault: str | None, cases: int, seed: int, known: list[int]) -> list[int]:
    """Return the numbers of the cases that fail, of a fault the first one that is not known."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [
            sys.executable, str(HERE / "fuzz.py"), "--cases", str(cases), "--seed", str(seed), "--found", str(found),
            "--known", json.dumps(known), *(["--stop"] if fault else []),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(planted(Path(folder), fault))}
        subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
        return json.loads(found.read_text(encoding="utf-8"))


def search(cases: int, seed: int) -> int:
    """Look for each fault; return how many are not found."""
    known = failing(None, cases, seed, [])
    print(f"without a fault {len(known)} of {cases} cases fail, which count for none")
    missed = 0
    for fault in FAULTS:
        found = failing(fault, cases, seed, known)
        missed += not found
        print(f"  {'found at case ' + str(found[0]) if found else 'NOT FOUND'}: {fault}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} planted faults found within {cases} cases of seed {seed}")
    return missed
