"""The budget of one rendering of a chat template: seconds, characters, items, and the meter that counts them."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import TypeVar

from roofline.common.errors import RequestError

MAX_RENDERED = 4 * 1024 * 1024  # characters of a rendered chat, and of any one text on the way
MAX_WORK = 64 * 1024 * 1024  # characters of all texts made on the way
MAX_ITEMS = 100_000  # of one list a template makes
MAX_WIDTH = 1_000  # of a padded or formatted field
MAX_DEPTH = 100  # of containers in containers
MAX_BITS = 4_096  # of an integer
T = TypeVar("T")
_WIDTH = re.compile(r"\d+")


class RenderBudget:
    """What one rendering may use up, seconds and characters made in all its steps together, and what is left of it."""

    def __init__(self, seconds: float, characters: int, longest: int) -> None:
        self.seconds, self.characters, self.longest = seconds, characters, longest
        self.deadline, self.remaining = monotonic() + seconds, characters


_meter: ContextVar[RenderBudget] = ContextVar("meter of the rendering under way")


def over_budget(what: str) -> RequestError:
    """The error of a template that wants more than it may have."""
    return RequestError(400, "chat_template_budget", f"the chat template {what}")


@contextmanager
def metered(meter: RenderBudget) -> Iterator[None]:
    """Makes `meter` the one that the functions below use, while the body runs in this context."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def charge(characters: int) -> None:
    """Counts a string before it is made. Raises RequestError when it is too long, or all together are."""
    meter = _meter.get()
    meter.remaining -= characters + 16
    if characters > meter.longest:
        raise over_budget(f"makes a text of more than {meter.longest:,} characters")
    if meter.remaining < 0:
        raise over_budget(f"makes more than {meter.characters:,} characters of intermediate text")


def longest() -> int:
    """The most characters one text of the rendering under way may have."""
    return _meter.get().longest


def tick() -> None:
    """Raises RequestError after the deadline of the rendering under way."""
    meter = _meter.get()
    if monotonic() > meter.deadline:
        raise over_budget(f"takes longer than {meter.seconds:g} s")


def ticking(items: Iterable[T]) -> Iterator[T]:
    """The items; the deadline is checked before each."""
    for item in items:
        tick()
        yield item


def bounded(items: Iterable[T]) -> list[T]:
    """The items as a list of at most `MAX_ITEMS`."""
    result: list[T] = []
    for item in ticking(items):
        check_items(len(result) + 1)
        result.append(item)
    return result


def check_items(count: int) -> None:
    """Refuses to make more than `MAX_ITEMS` items."""
    if count > MAX_ITEMS:
        raise over_budget(f"makes a list of more than {MAX_ITEMS:,} items")


def check_width(size: int | str) -> None:
    """Refuses field widths and precisions above `MAX_WIDTH`, and those that come from arguments."""
    widths = [size] if isinstance(size, int) else [int(digits) for digits in _WIDTH.findall(size)]
    if any(width > MAX_WIDTH for width in widths) or (isinstance(size, str) and ("*" in size or "{" in size)):
        raise over_budget(f"pads a field to more than {MAX_WIDTH} characters")
