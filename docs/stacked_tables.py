# SPDX-License-Identifier: MIT
"""A Sphinx extension: tables of many columns become lists on narrow screens, each number beside the name of its column.

It writes that name into each cell, and ``_static/custom.css`` does the rest.
"""

from __future__ import annotations

from typing import Any

from bs4 import BeautifulSoup

MANY = 3  # columns that are too many for a phone
AS_THEY_ARE = ["marks", "tally"]  # the classes around tables that fit a phone by themselves


def name_cells(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:  # noqa: ARG001 - the event's
    """Give each cell of a table of many columns the name of its column."""
    if "<table" not in context.get("body", ""):
        return
    body = BeautifulSoup(context["body"], "html.parser")
    for table in body.select("table.docutils"):
        names = [cell.get_text(" ", strip=True) for cell in table.select("thead th")]
        if len(names) >= MANY and not table.find_parent(class_=AS_THEY_ARE):
            table["class"] = [*table["class"], "stacked"]
            for row in table.select("tbody tr"):
                for name, cell in zip(names, row.find_all("td"), strict=True):
                    if not cell.get_text(strip=True):
                        cell.clear()  # so that it is hidden
                    cell["data-label"] = name
    context["body"] = str(body)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("html-page-context", name_cells)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
