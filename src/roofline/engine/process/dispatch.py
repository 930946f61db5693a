"""Which of several engines computes a request: the one that will be done with its prompt first.

An engine that holds the beginning of a prompt in its cache need not compute it, but may be busy. Both are tokens, so
they compare: what an engine has to compute before, and what it has to compute of this prompt. A preference for held
pages yields just where waiting for them takes longer than computing them elsewhere.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from roofline.engine.cache.paged import PageKeys, root_key
from roofline.engine.process.remote import RemoteEngine, Stream
from roofline.ops.batch import PAGE_TOKENS

# What an answer weighs beside tokens of prompts; how long it will go on is not known. A conversation of some hundred
# tokens stays where its pages are though a few more answers are made there, not though there are dozens.
ANSWER_TOKENS = 64
MOST_PAGES = 1 << 16  # remembered for an engine: a million tokens


class HeldPages:
    """The pages that a cache can be thought to hold: the ones of the latest prompts, as many as it has room for.

    Args:
        most: pages of the cache.
    """

    def __init__(self, most: int) -> None:
        self._most = min(most, MOST_PAGES)
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the latest last

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of these pages, from the first one on, are held."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt of these pages is computed now."""
        for key in reversed(keys):  # a page is of no use without those before it: they are forgotten last
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)


class Candidate:
    """An engine that requests may go to, and what is known of its cache."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self.turn = 0  # number of the latest request it was given
        self._pid, self._held = 0, HeldPages(0)  # of the process whose cache is meant

    @property
    def outstanding(self) -> int:
        """Tokens that it has to compute, as far as is known."""
        return sum(stream.uncomputed + ANSWER_TOKENS * len(stream.open) for stream in self.engine.streams.values())

    @property
    def held(self) -> HeldPages:
        """What its present process has computed; a fresh one begins with nothing."""
        description = self.engine.description
        if description is not None and description.pid != self._pid:
            self._pid = description.pid
            self._held = HeldPages(description.num_pages)
        return self._held

    def uncomputed(self, prompt: Sequence[int], keys: Sequence[bytes]) -> int:
        """Tokens of a prompt that it would have to compute: always the last one."""
        return len(prompt) - min(self.held.leading(keys) * PAGE_TOKENS, len(prompt) - 1)

    def given(self, stream: Stream, keys: Sequence[bytes], uncomputed: int, turn: int) -> None:
        """It got a request."""
        stream.uncomputed, self.turn = uncomputed, turn
        self.held.add(keys)


def keys_of(prompt: list[int], salt: str) -> list[bytes]:
    """The keys of a prompt's full pages, as caches make them. salt: of whoever shares prefixes."""
    return PageKeys(root_key("", salt=salt)).upto(prompt, len(prompt) // PAGE_TOKENS)


def choose(candidates: Iterable[Candidate], prompt: Sequence[int], keys: Sequence[bytes]) -> tuple[Candidate, int]:
    """The candidate that is done first with what it has and this prompt, and how much of the prompt it computes. Of
    equal ones the one that has waited longest for a request."""
    best = min(
        ((each.outstanding + (own := each.uncomputed(prompt, keys)), each.turn, own, each) for each in candidates),
        key=lambda found: found[:2],
    )
    return best[3], best[2]
