"""What is refused before it reaches an engine, here or in a process of its own."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from roofline.common.errors import CapacityError
from roofline.engine.params import SamplingParams, invalid


def token_ids(field: str, ids: Iterable[Any]) -> list[int]:
    """Plain integers (numpy's too). Raises RequestError on anything else."""
    try:
        return [operator.index(i) for i in ids]
    except TypeError as error:
        raise invalid(field, f"is not a list of token ids: {error}") from error


def check_request(
    prompt: list[int], params: SamplingParams, eos_ids: list[int], vocab_size: int, max_model_len: int
) -> int:
    """Refuse what cannot be computed; return the longest answer in tokens.

    Raises:
        RequestError: an empty prompt, or an id outside the vocabulary.
        CapacityError: prompt plus answer is longer than max_model_len.
    """
    if not prompt:
        raise invalid("prompt", "has no tokens")
    named: tuple[tuple[str, Sequence[int]], ...] = (
        ("prompt", prompt),
        ("eos_ids", eos_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [i for i, _ in params.logit_bias]),
    )
    for field, ids in named:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            worst = next(i for i in ids if not 0 <= i < vocab_size)
            raise invalid(field, f"id {worst} is not in the vocabulary of {vocab_size}")
    wanted = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    if len(prompt) + wanted > max_model_len:
        raise CapacityError(
            f"A prompt of {len(prompt):,} tokens with an answer of {wanted:,}",
            len(prompt) + wanted,
            max_model_len,
            "tokens",
            "Shorten the prompt, lower max_tokens, or serve with a larger max_model_len or cache.",
        )
    return params.max_tokens if params.max_tokens is not None else max_model_len - len(prompt)
