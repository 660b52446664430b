# SPDX-License-Identifier: MIT
"""Draw the modules of uniclip by their imports, and the path of a gradient through them.

Run ``python docs/house.py`` after a change of modules.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from drawing_style import TEXT
from matplotlib.figure import Figure

import uniclip as uc

FOLDER, SOURCE = Path(__file__).parent / "_static", Path(uc.__file__).parent
CORE = "_core"
THEMES = {
    "light": ("#404040", "#b35a00", "#767676", "white"),
    "dark": ("#d8d8d8", "#f0943a", "#9a9a9a", "#131416"),
}
"""The colors of text, of the path of a gradient, of the other modules, and of a page."""


def room_of(path: Path) -> str:
    """Return the name under which a file is drawn: its package, or its module in the core.

    Other private modules are not drawn.
    """
    return room_in(path.relative_to(SOURCE).with_suffix("").parts)


def room_in(names: Sequence[str]) -> str:
    """Return the drawn name for the names below ``uniclip`` that lead to a module."""
    first = names[1] if names[0] == CORE else names[0]
    return "" if first.startswith("_") else first


def find_floors() -> dict[str, int]:
    """Return the level of each module: one above the highest module that it imports."""
    below: dict[str, set[str]] = {}
    for path in filter(room_of, SOURCE.rglob("*.py")):
        imports = [
            node.module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom)
        ]
        modules = [
            module.split(".") for module in imports if module and module.startswith("uniclip.")
        ]
        names = {room_in(module[1:]) for module in modules}
        below.setdefault(room_of(path), set()).update(names)

    def floor(room: str) -> int:
        return 1 + max([floor(other) for other in below[room] & below.keys() - {room}], default=0)

    return {room: floor(room) for room in below}


def follow_gradient(rule: uc.Rule) -> list[str]:
    """Return the modules that a step enters, in their order."""
    rooms: dict[str, None] = {}

    def see(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and SOURCE in path.parents and room_of(path):
            rooms[room_of(path)] = None

    tree = {"w": np.ones((4, 3)), "b": np.ones(3)}
    # The first step of a process looks for the library of its arrays.
    uc.clip(tree, rule, tree)
    sys.setprofile(see)
    try:
        uc.clip(tree, rule, tree)
    finally:
        sys.setprofile(None)
    return list(rooms)


def draw(text: str, orange: str, gray: str, page: str) -> Figure:
    """Draw each module on its level: those of a step first, from left to right."""
    floors, way, _ = describe()
    figure = Figure(figsize=(5.4, 4.8))
    ax = figure.subplots()
    columns = np.cumsum([0.0] + [1.0 + (floors[a] == floors[b]) for a, b in pairwise(way)])
    ax.plot(columns, [floors[room] for room in way], color=orange, linewidth=1.5)
    box = {"boxstyle": "round,pad=0.25", "facecolor": page}
    for room, column in zip(way, columns, strict=True):
        style = {"color": text, "bbox": box | {"edgecolor": orange}}
        ax.text(column, floors[room], room, ha="center", va="center", size=8, **style)
    ends = dict.fromkeys(floors.values(), columns[-1] + 5.0)
    for room in sorted(floors.keys() - set(way)):
        style = {"color": gray, "bbox": box | {"edgecolor": gray}}
        ax.text(ends[floors[room]], floors[room], room, ha="right", va="center", size=8, **style)
        ends[floors[room]] -= 0.4 * len(room) + 0.9
    ax.set(
        xlim=(-1, columns[-1] + 5.3),
        ylim=(0.4, max(floors.values()) + 0.6),
        xticks=[],
        yticks=[1, max(ends)],
    )
    ax.set(
        xlabel="the modules that a step enters, in their order",
        ylabel="each imports only what is below it",
    )
    ax.set_yticklabels([])
    ax.tick_params(length=0)
    return figure


def describe() -> tuple[dict[str, int], list[str], str]:
    """Return levels and path, and both in a line for the metadata of the figure."""
    floors, way = find_floors(), follow_gradient(uc.agc())
    return (
        floors,
        way,
        f"{' '.join(way)}: {' '.join([f'{room} {floors[room]}' for room in sorted(floors)])}",
    )


def refuse_old() -> None:
    """Raise an error if the figure does not match the code."""
    for name in THEMES:
        if describe()[-1] not in (FOLDER / f"house-{name}.svg").read_text(encoding="utf-8"):
            msg = f"house-{name}.svg is of other modules than there are: run python docs/house.py"
            raise RuntimeError(msg)


if __name__ == "__main__":
    for name, colors in THEMES.items():
        with mpl.rc_context({"font.size": 10} | dict.fromkeys(TEXT, colors[0])):
            file = FOLDER / f"house-{name}.svg"
            draw(*colors).savefig(file, metadata={"Date": None, "Description": describe()[-1]})
