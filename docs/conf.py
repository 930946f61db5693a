"""Configuration of the documentation site: `make docs` builds it into build/docs, offline, with warnings as errors."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import roofline

project = "Roofline"
author = "the Roofline authors"
copyright = "the Roofline authors"
release = version = roofline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "_ext.command_help"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_title = "Roofline"
html_show_sourcelink = False
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
nitpicky = True
# Types that signatures name and no page describes: the standard library's, numpy's, torch's and our inner ones.
nitpick_ignore_regex = [(r"py:.*", r".*")]


def _as_rst(app, what, name, obj, options, lines):
    """Our docstrings are plain text with Markdown's backticks: made into reStructuredText here."""
    text = []
    for line in lines:
        line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        parts = re.split(r"(``.*?``)", line)
        text.append("".join(p if p.startswith("``") else re.sub(r"([*|]|_(?=\W|$))", r"\\\1", p) for p in parts))
    # "name: what it is" lines, one argument each, become a list; lines that are indented deeper go on with it.
    out: list[str] = []
    for line in text:
        entry = re.match(r"^(\s*)([\w, ]+): (.+)$", line)
        if entry and (entry[1] or re.match(r"^[a-z_]+(, [a-z_]+)*$", entry[2])):
            if not out or not out[-1].startswith(("* ", "  ")):
                out.append("")
            out.append(f"* ``{entry[2]}``: {entry[3]}")
        elif line.startswith("    ") and out and out[-1].startswith(("* ", "  ")):
            out.append("  " + line.strip())
        else:
            if line.strip() and out and out[-1].startswith(("* ", "  ")):
                out.append("")
            out.append(line.strip() if not re.match(r"^\s*(>>>|\.\.)", line) else line)
    lines[:] = out


def setup(app):
    app.connect("autodoc-process-docstring", _as_rst)
