"""Roofline: one LLM stack for every chip. Importing this package does no work; names load when they are first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roofline.engine.beams import BeamSearchParams
    from roofline.engine.chat_module import ChatModule
    from roofline.engine.constraint import Constraint
    from roofline.engine.llm import LLM
    from roofline.engine.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamSearchParams", "ChatModule", "Constraint", "SamplingParams", "__version__"]

_MODULES = {
    "LLM": "engine.llm",
    "BeamSearchParams": "engine.beams",
    "ChatModule": "engine.chat_module",
    "Constraint": "engine.constraint",
    "SamplingParams": "engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'roofline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"roofline.{_MODULES[name]}"), name)
