"""load(source): the one place where program, weights, text and backend meet; and bundles, which keep the result."""

from roofline.bundle.draft_pair import check_draft, load_with_draft
from roofline.bundle.loader import LoadedModel, compile_ahead, load, load_text_of
from roofline.bundle.sources import compile_model
from roofline.bundle.text_side import load_text, with_template

__all__ = [
    "LoadedModel", "check_draft", "compile_ahead", "compile_model", "load", "load_text", "load_text_of",
    "load_with_draft", "with_template",
]  # fmt: skip
