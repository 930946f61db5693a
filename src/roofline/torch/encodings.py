"""Ids as users of transformers have them: tensors, lists, and the encodings that a tokenizer returns."""

from collections.abc import Iterable, Mapping
from typing import TypeGuard

from torch import Tensor

from roofline.engine.checks import token_ids
from roofline.engine.llm import Prompt
from roofline.engine.params import invalid

IDS, MASK = "input_ids", "attention_mask"
IdRows = Tensor | Iterable[object]  # integers [tokens] or [batch, tokens], or a list of rows of any length
Encoding = Mapping[str, object]  # transformers' BatchEncoding: "input_ids", and an "attention_mask" beside it


def is_encoding(value: object) -> TypeGuard[Encoding]:
    """Whether a value is what a tokenizer of transformers returns."""
    return isinstance(value, Mapping) and IDS in value


def prompts_of(prompts: object) -> object:
    """Prompts as `LLM.generate` takes them: an encoding among them is replaced by its rows."""
    if is_encoding(prompts):
        return encoding_rows(prompts)
    if isinstance(prompts, str | bytes | Mapping | Tensor) or not isinstance(prompts, Iterable):
        return prompts
    listed: list[Prompt] = []
    for prompt in prompts:
        listed += encoding_rows(prompt) if is_encoding(prompt) else [prompt]
    return listed


def encoding_rows(encoding: Encoding) -> list[list[int]]:
    """The ids of each text of an encoding, without padding. Raises RequestError for one that has anything else."""
    others = [name for name, value in encoding.items() if name not in (IDS, MASK) and value is not None]
    if others:
        problem = (
            f"an encoding with {', '.join(map(repr, others))}; ids and attention_mask are read, and nothing beside"
        )
        raise invalid("prompt", problem)
    return id_rows(encoding[IDS], encoding.get(MASK))


def id_rows(input_ids: object, attention_mask: object = None) -> list[list[int]]:
    """The rows of ids, those left out at which the mask has a 0.

    Raises RequestError for what is no list of ids, and for a mask of another shape or of other numbers than 0 and 1.
    """
    rows = [token_ids(IDS, row) for row in _rows(IDS, input_ids)]
    if attention_mask is None:
        return rows
    masks = [[float(bit) for bit in row] for row in _rows(MASK, attention_mask)]  # type: ignore[arg-type]
    if [*map(len, masks)] != [*map(len, rows)]:
        raise invalid(MASK, "has another shape than input_ids")
    if any(bit not in (0.0, 1.0) for row in masks for bit in row):
        raise invalid(MASK, "has other numbers than 1, for ids that are read, and 0, for padding")
    return [[token for token, bit in zip(row, mask, strict=True) if bit] for row, mask in zip(rows, masks, strict=True)]


def _rows(name: str, value: object) -> list[Iterable[object]]:
    """A tensor, an array or a list of numbers, or of rows of them, as rows."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, str | bytes | Mapping) or not isinstance(plain, Iterable):
        raise invalid(name, f"{type(value).__name__} is neither a tensor nor a list of numbers, or of rows of them")
    listed = [part.tolist() if hasattr(part, "tolist") else part for part in plain]
    return listed if listed and isinstance(listed[0], list | tuple) else [listed]
