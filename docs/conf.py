# SPDX-License-Identifier: MIT
"""Build the documentation.

It needs no network. It needs the frameworks only for examples and measurements.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util import logging

import uniclip
from uniclip import insight

# Keras' decorators cannot be mocked, and this backend needs no framework.
os.environ["KERAS_BACKEND"] = "numpy"

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import generate  # noqa: E402 - needs the path above
import search_words  # noqa: E402 - needs the path above

project = "uniclip"
author = "The uniclip developers"
copyright = author  # noqa: A001 - Sphinx's name
version = release = uniclip.__version__

extensions = [
    "myst_parser",
    "notfound.extension",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
]
exclude_patterns = ["_build", "_generated"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings have cross-references in single backticks, numpydoc sections, no types in signatures.
default_role = "py:obj"
autodoc_mock_imports = [
    "accelerate",
    "jax",
    "lightning",
    "optax",
    "tensorflow",
    "torch",
    "transformers",
]
# On import, modules compare the version of a framework, and enter a context.
for method in ("__lt__", "__ge__", "__enter__", "__exit__"):
    setattr(_MockObject, method, lambda *_: False)
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = False  # types such as "array or tree of arrays" are prose, not references
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
# These types are prose.
nitpick_ignore_regex = [("py:class", r"[nmk]|(0-d )?arrays?|tree|int64|float64|str to|\{?\".*")]
# Lightning documents this class.
nitpick_ignore = [("py:exc", "lightning.pytorch.utilities.exceptions.MisconfigurationException")]

html_theme = "furo"
html_title = "uniclip"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_math_renderer = "mathml"
# The documentation is served here.
notfound_urls_prefix = "/"
llms_txt_exclude = ["404"]
llms_txt_uri_template = "_sources/{docname}.md.txt"
llms_txt_summary = (
    "Gradient clipping for PyTorch, TensorFlow, JAX, Keras, NumPy and every other array API "
    "library."
)
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Too many columns for a phone.
MANY = 3
# The classes around tables that fit a phone.
AS_THEY_ARE = ["marks", "tally"]

generate.everything()


def check_public_names(app: Any, env: Any) -> None:  # noqa: ARG001 - the signature of the event
    """Warn of undocumented public names, and of documented names that are not public."""
    objects = [
        name.split(".")
        for name, entry in env.domaindata["py"]["objects"].items()
        if not entry.aliased
    ]
    for home in (uniclip, uniclip.scopes, uniclip.norms, uniclip.limits, uniclip.curves, insight):
        path = home.__name__.split(".")
        documented = {
            parts[len(path)]
            for parts in objects
            if parts[: len(path)] == path and len(parts) > len(path)
        }
        public = set(home.__all__) - ({"Limit", "Norm", "Scope"} if home is not uniclip else set())
        for name in sorted((documented - {"config", "insight", "integrations", "saved"}) ^ public):
            where = "docs/api/" if name in public else f"{home.__name__}.__all__"
            logging.getLogger(__name__).warning(
                "%s.%s is missing from %s", home.__name__, name, where
            )


def formula(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers render without a script.

    Displayed formulas are on a line of their own.
    """
    block = isinstance(node, nodes.math_block)
    math = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{math}</div>' if block else math)
    raise nodes.SkipNode


def stack_tables(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:  # noqa: ARG001 - the event's
    """Copy column names into the cells of wide tables, which custom.css turns into lists."""
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
                        # An empty cell is hidden.
                        cell.clear()
                    cell["data-label"] = name
    context["body"] = str(body)


def setup(app: Any) -> None:
    """Register the functions above, and the search words."""
    app.connect("env-check-consistency", check_public_names)
    app.connect("html-page-context", stack_tables)
    app.connect("source-read", search_words.add_words)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
