"""load(source): the one place where program, weights, text and backend meet."""

from roofline.bundle.loader import LoadedModel, load, load_text

__all__ = ["LoadedModel", "load", "load_text"]
