"""What the rendering of a chat template may use up."""

import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, Token
from time import monotonic
from typing import Any

from roofline.common.errors import RequestError

MAX_ITEMS = 100_000  # of one list a template makes
MAX_WIDTH = 1_000  # of a padded or formatted field
MAX_DEPTH = 100  # of containers in containers
MAX_BITS = 4_096  # of an integer
_WIDTH = re.compile(r"\d+")


class Meter:
    """What one rendering may use up: seconds, and characters made in all its steps together."""

    def __init__(self, seconds: float, characters: int, longest: int) -> None:
        self.seconds, self.characters, self.longest = seconds, characters, longest
        self._deadline = monotonic() + seconds
        self._left = characters

    def tick(self) -> None:
        """Refuses to go on after the deadline."""
        if monotonic() > self._deadline:
            raise over_budget(f"takes longer than {self.seconds:g} s")

    def charge(self, characters: int) -> None:
        """Pays for a string before it is made."""
        self._left -= characters + 16
        if characters > self.longest:
            raise over_budget(f"makes a text of more than {self.longest:,} characters")
        if self._left < 0:
            raise over_budget(f"makes more than {self.characters:,} characters of intermediate text")


_meter: ContextVar[Meter] = ContextVar("meter of the rendering under way")


def over_budget(what: str) -> RequestError:
    """The error of a template that wants more than it may have."""
    return RequestError(400, "chat_template_budget", f"the chat template {what}")


def use(meter: Meter) -> Token[Meter]:
    """Makes `meter` the one that pays in this context; returns the token for `release`."""
    return _meter.set(meter)


def release(token: Token[Meter]) -> None:
    """Undoes `use`."""
    _meter.reset(token)


def charge(characters: int) -> None:
    """Pays, from the rendering under way, for a string before it is made."""
    _meter.get().charge(characters)


def longest() -> int:
    """The most characters one text of the rendering under way may have."""
    return _meter.get().longest


def tick() -> None:
    """Checks the deadline of the rendering under way."""
    _meter.get().tick()


def ticking(items: Iterable[Any]) -> Iterator[Any]:
    """The items, with a look at the clock before each."""
    check = _meter.get().tick
    for item in items:
        check()
        yield item


def bounded(items: Iterable[Any]) -> list[Any]:
    """The items as a list of at most `MAX_ITEMS`."""
    made: list[Any] = []
    for item in ticking(items):
        if len(made) == MAX_ITEMS:
            raise over_budget(f"makes a list of more than {MAX_ITEMS:,} items")
        made.append(item)
    return made


def check_items(count: int) -> None:
    """Refuses to make more than `MAX_ITEMS` items."""
    if count > MAX_ITEMS:
        raise over_budget(f"makes a list of more than {MAX_ITEMS:,} items")


def check_width(size: int | str) -> None:
    """Refuses field widths and precisions above `MAX_WIDTH`, and those that come from arguments."""
    widths = [size] if isinstance(size, int) else [int(digits[:9]) for digits in _WIDTH.findall(size)]
    if any(width > MAX_WIDTH for width in widths) or (isinstance(size, str) and ("*" in size or "{" in size)):
        raise over_budget(f"pads a field to more than {MAX_WIDTH} characters")
