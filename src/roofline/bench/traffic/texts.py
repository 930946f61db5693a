"""Texts of traffic: words at random that have about so many tokens, and prompts from a pool with a randomiser."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from roofline.bench.traffic.random_integers import RandomIntegers

SENTENCE = 12  # tokens of a sentence: its words and its full stop


@cache
def lengths(name: str) -> Sequence[int]:
    """The quantiles of a table of `lengths.toml`."""
    tables = tomllib.loads(Path(__file__).with_name("lengths.toml").read_text("utf-8"))
    quantiles: list[int] = tables[name]["quantiles"]
    return quantiles


@cache
def _lists() -> dict[str, dict[str, list[str]]]:
    tables = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
    return {"text": {"words": tables["text"]["words"].split()}, "randomiser": tables["randomiser"]}


def prose(random: RandomIntegers, tokens: int) -> str:
    """Words in sentences without a meaning, of about so many tokens: a token for a word, and one for a full stop."""
    sentences = tokens // SENTENCE
    parts = random.some_of(_lists()["text"]["words"], tokens - sentences)
    for last in range(1, sentences + 1):
        parts[last * (SENTENCE - 1) - 1] += "."
    return " ".join(parts)


def pooled_prompt(random: RandomIntegers, pool: Sequence[str], number: int) -> str:
    """The request of that number: a template of the pool with its phrases, behind a salt that no other request of the
    stream has, so that nothing but the salt's brackets can be cached."""
    lists = _lists()["randomiser"]
    phrases = {
        name: random.one_of(lists[f"{name}s"]) for name in ("kind", "topic", "place", "reader", "tone", "detail")
    }
    salt = (random.bits() & 0xFFFF) << 24 | number & 0xFFFFFF
    return f"[{salt:010x}] {random.one_of(pool).format(**phrases)}"


def pool_of(random: RandomIntegers, size: int) -> list[str]:
    """A pool of so many templates: the first ones as they are, later ones with two words at random behind them."""
    templates = _lists()["randomiser"]["templates"]
    more = (f"{random.one_of(templates)} Use the words {prose(random, 2)}." for _ in range(size - len(templates)))
    return [*templates[:size], *more]
