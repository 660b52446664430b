# SPDX-License-Identifier: MIT
"""Build the documentation; it needs no network, and the frameworks only for its examples and measurements."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

import uniclip
from uniclip import insight

os.environ["KERAS_BACKEND"] = "numpy"  # its decorators cannot be mocked, and this backend needs no framework

HERE = Path(__file__).parent
sys.path.append(str(HERE))

import generate  # noqa: E402 - needs the path above

project = "uniclip"
author = "The uniclip developers"
copyright = author  # noqa: A001 - Sphinx's name
version = release = uniclip.__version__

extensions = [
    "myst_parser",
    "notfound.extension",
    "search_words",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
    "stacked_tables",
]
exclude_patterns = ["_build", "_generated"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings: single backticks are cross-references, numpydoc sections, no types in signatures.
default_role = "py:obj"
autodoc_mock_imports = ["jax", "lightning", "optax", "tensorflow", "torch", "transformers"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_param = False  # types such as "array or tree of arrays" are prose, not references
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [("py:class", r"[nmk]|array|int64|float64|str to|\{?\".*")]  # shapes and dtypes are prose
nitpick_ignore = [
    ("py:class", "tree"),  # the type of an attribute is prose, too
    ("py:class", "arrays"),
    ("py:class", "0-d array"),
    ("py:exc", "lightning.pytorch.utilities.exceptions.MisconfigurationException"),  # not ours
]

html_theme = "furo"
html_title = "uniclip"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_math_renderer = "mathml"
notfound_urls_prefix = "/"  # where the documentation is served
llms_txt_exclude = ["404"]
llms_txt_uri_template = "_sources/{docname}.md.txt"
llms_txt_summary = "Gradient clipping for PyTorch, TensorFlow, JAX, Keras, NumPy and every other array API library."
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

if not tags.has("generated"):  # noqa: F821 - of Sphinx; set where it is made already
    generate.everything()


def check_public_names(app: Any, env: Any) -> None:  # noqa: ARG001 - the signature of the event
    """Warn of public names that are not documented or have no example, and of documented names that are not public."""
    warning = logging.getLogger(__name__).warning
    objects = [name.split(".") for name, entry in env.domaindata["py"]["objects"].items() if not entry.aliased]
    for home in (uniclip, uniclip.scopes, uniclip.norms, uniclip.limits, uniclip.curves, insight):
        path = home.__name__.split(".")
        documented = {parts[len(path)] for parts in objects if parts[: len(path)] == path and len(parts) > len(path)}
        public = set(home.__all__) - ({"Limit", "Norm", "Scope"} if home is not uniclip else set())
        for name in sorted((documented - {"config", "insight", "integrations", "saved"}) ^ public):
            where = "docs/api/" if name in public else f"{home.__name__}.__all__"
            warning("%s.%s is missing from %s", home.__name__, name, where)
        for name in sorted(public):
            value = getattr(home, name)
            if callable(value) and ">>>" not in (value.__doc__ or ""):
                warning("%s.%s has no example in its docstring", home.__name__, name)


def inline_math(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def display_math(translator: Any, node: Any) -> None:
    """Write a formula on a line of its own."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the check of the public names and the renderer of formulas."""
    app.connect("env-check-consistency", check_public_names)
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
