"""Checks of a request that need no engine, so that a wrong request is refused before it is sent to one."""

import operator
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict

from roofline.common.errors import CapacityError, RequestError
from roofline.engine.params import SamplingParams, invalid

NO_MEDIA: Mapping[int, str] = MappingProxyType({})


class RequestOptions(TypedDict, total=False):
    """What every engine's `submit` takes beside a prompt and its parameters."""

    eos_ids: Iterable[int]  # the model's own end-of-generation ids
    request_id: str | None  # a name of the caller's, not in use; None makes one
    salt: str  # prefixes are shared only between requests of the same salt (a tenant)
    adapter: str  # the digest of a loaded adapter; "": none
    priority: int  # the lowest is computed first; 0 where nobody says


def request_parts(
    ids: Iterable[int],
    params: SamplingParams | None,
    eos_ids: Iterable[int] = (),
    request_id: str | None = None,
    salt: str = "",
    adapter: str = "",
    priority: int = 0,
) -> tuple[list[int], SamplingParams, list[int], str, str, str, int]:
    """The arguments of `submit` with their defaults: prompt, parameters, end ids, the request's id, salt, adapter and
    priority.

    Raises RequestError as `token_ids`.
    """
    # A name that nobody else has; `uuid` and `secrets` would take a tenth of a process's start to import.
    name = request_id if request_id is not None else os.urandom(16).hex()
    prompt, ends = token_ids("prompt", ids), token_ids("eos_ids", eos_ids)
    return prompt, params or SamplingParams(), ends, name, salt, adapter, priority


def check_unused(request_id: str, names: Container[str]) -> None:
    """Refuse a request id that is among `names`, those of open requests."""
    if request_id in names:
        raise RequestError(400, "duplicate_request", f"request_id {request_id!r} is in use", param="request_id")


def token_ids(field: str, ids: Iterable[object]) -> list[int]:
    """Ids as Python's integers, of numpy's and torch's too. Raises RequestError on what is no list of them."""
    try:
        plain: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        kinds = set(map(type, plain))
        if bool in kinds:
            raise TypeError("True and False are no ids")
        return plain if kinds <= {int} else [operator.index(i) for i in plain]
    except TypeError as error:
        raise invalid(field, f"is not a list of token ids: {error}") from error


def media_in(prompt: Sequence[int], media_ids: Mapping[int, str]) -> str:
    """What is wrong with a prompt that asks for a picture or for sound to be read, "" where it does not.

    media_ids: the ids that stand for these, or enclose them -> what the model's configuration calls them.
    """
    if not media_ids or media_ids.keys().isdisjoint(prompt):
        return ""
    token = next(i for i in prompt if i in media_ids)
    return f"id {token} is the model's {media_ids[token]}, which is for pictures or sound, and text alone is read here"


def check_request(
    prompt: list[int],
    params: SamplingParams,
    eos_ids: list[int],
    vocab_size: int,
    max_model_len: int,
    encoder: bool = False,
    media_ids: Mapping[int, str] = NO_MEDIA,
) -> int:
    """The longest answer in tokens; of a request with pooling 1, which is not computed. Raises RequestError for an
    empty prompt and for an id that is outside the vocabulary or stands for a picture or for sound, CapacityError where
    prompt and answer exceed max_model_len. encoder: whether the model is one; media_ids: see `media_in`."""
    if not prompt:
        raise invalid("prompt", "has no tokens")
    fields: tuple[tuple[str, Sequence[int]], ...] = (
        ("prompt", prompt),
        ("eos_ids", eos_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(dict(params.logit_bias))),
        ("pooling", params.pooling.ids if params.pooling is not None else ()),
    )
    for field, ids in fields:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            worst = next(i for i in ids if not 0 <= i < vocab_size)
            raise invalid(field, f"id {worst} is not in the vocabulary of {vocab_size}")
    if problem := media_in(prompt, media_ids):
        raise invalid("prompt", problem)
    if params.pooling is not None:
        if len(prompt) > max_model_len:
            remedy = "Shorten it, or serve with a larger max_model_len or cache."
            if encoder:  # whose prompts are computed in one step
                remedy = "Shorten it, or serve with a larger max_batch_tokens, as far as the model has positions."
            raise CapacityError("A prompt", len(prompt), max_model_len, "tokens", remedy)
        return 1
    answer = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    if len(prompt) + answer > max_model_len:
        what = f"A prompt of {len(prompt):,} tokens with an answer of {answer:,}"
        remedy = "Shorten the prompt, lower max_tokens, or serve with a larger max_model_len or cache."
        raise CapacityError(what, len(prompt) + answer, max_model_len, "tokens", remedy)
    return params.max_tokens if params.max_tokens is not None else max_model_len - len(prompt)
