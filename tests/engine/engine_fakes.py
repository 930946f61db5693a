"""A toy executable whose every logit depends on what is read back through the page tables.

A token's "KV" is (position, id), written into its page. A row's logits are a hash of all (position, id) pairs from 0 to
the row's own position, read through the segment's page table: a wrong table, a page shared too early or overwritten
changes the answer.
"""

import gc
import os
import signal
import time
from collections import Counter

import numpy as np

from roofline.backends.base import LostError, MonotonicClock, StepCost
from roofline.backends.sampling import MAX_LOGPROBS, Sampled, SampleRows
from roofline.common.errors import CapacityError, ConfigError
from roofline.engine.cache.naive import NaiveCache
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits

HIDDEN_WIDTH = 8
M1, M2, M3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x):
    """splitmix64 on uint64 arrays."""
    with np.errstate(over="ignore"):
        x = (np.asarray(x, np.uint64) + M1).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * M2
        x = (x ^ (x >> np.uint64(27))) * M3
        return x ^ (x >> np.uint64(31))


def uniform(x):
    """(0, 1) from uint64."""
    return ((mix(x) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


class FakeExecutable:
    fingerprint, exact = "fake", True

    def __init__(
        self,
        num_pages=64,
        vocab_size=50,
        max_context=512,
        tokens=64,
        segments=16,
        rows=None,
        table_pages=None,
        step_seconds=0.0,
        weights=0,
        doubling_depth=None,
    ):
        self.vocab_size, self.max_context, self.num_pages, self.page_bytes = vocab_size, max_context, num_pages, 1024
        self.limits = BatchLimits(tokens, segments, rows or segments, table_pages or num_pages * segments)
        self.batch, self.clock = Batch(self.limits), MonotonicClock()
        self.results = np.full((self.limits.rows, vocab_size), np.nan, np.float32)
        self.store = np.full((num_pages, PAGE_TOKENS, 2), -7, np.int64)
        self.step_seconds, self.weights, self.doubling_depth = step_seconds, np.uint64(weights), doubling_depth
        self.fail_at = set()  # numbers of forward calls that raise
        self.fail_sample = False
        self.bad_rows = set()  # (prompt's first id) of sequences whose sampled id is invalid
        self.bad_positions = set()  # where every sampled id is invalid
        self.die_on_id = ()  # a forward that sees this id, or one of these, kills the process
        self.die_with = "SIGKILL"
        self.lose_at = set()  # numbers of forward calls that find the device gone
        self.fail_on_id = None  # a forward that sees this id raises
        self.forwards = self.tokens_computed = 0
        self.closed = False
        self.before_forward = None

    def forward(self):
        assert not self.closed
        assert gc.isenabled(), "what steps leave behind in cycles would stay"
        self.forwards += 1
        self.results[:] = np.nan  # what was read of the step before was a view
        if self.before_forward is not None:
            self.before_forward(self)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.forwards in self.fail_at:
            raise RuntimeError("the toy was told to fail")
        if self.forwards in self.lose_at:
            raise LostError("the toy has no device any more")
        b = self.batch
        self.tokens_computed += b.tokens
        ids = self._ids()
        if np.isin(ids, self.die_on_id).any():
            os.kill(os.getpid(), signal.Signals[self.die_with])
        if self.fail_on_id is not None and (ids == self.fail_on_id).any():
            raise RuntimeError(f"the toy cannot bear id {self.fail_on_id}")
        self.segments = []
        for s in range(b.segments):
            start, stop = int(b.seg_start[s]), int(b.seg_start[s + 1])
            table = b.pages[b.page_start[s] : b.page_start[s + 1]]
            positions = b.positions[start:stop]
            assert b.context_len[s] == positions[-1] + 1
            self.store[table[positions // PAGE_TOKENS], positions % PAGE_TOKENS, 0] = positions
            self.store[table[positions // PAGE_TOKENS], positions % PAGE_TOKENS, 1] = ids[start:stop]
            self.segments.append((start, stop, table.copy()))
        self.rows = [self._row(int(row)) for row in b.logit_rows[: b.rows]]

    def _ids(self):
        return self.batch.ids[: self.batch.tokens]

    def _row(self, row):
        start, _stop, table = next(s for s in self.segments if s[0] <= row < s[1])
        assert start <= row
        at = np.arange(int(self.batch.positions[row]) + 1)
        pairs = self.store[table[at // PAGE_TOKENS], at % PAGE_TOKENS].astype(np.uint64)
        with np.errstate(over="ignore"):
            digest = np.bitwise_xor.reduce(mix(pairs[:, 0] * np.uint64(1000003) + pairs[:, 1] + mix(at)))
            noise = uniform(mix(digest ^ self.weights) + np.arange(self.vocab_size, dtype=np.uint64))
        self.first_id = int(pairs[0, 1])
        return (noise * 6 - 3).astype(np.float32), int(pairs[0, 1])

    def logits(self):
        for row, (logits, _) in enumerate(self.rows):
            self.results[row] = logits
        return self.results[: len(self.rows)]

    def sample(self, rows: SampleRows) -> Sampled:
        assert rows.rows == len(self.rows)
        if self.fail_sample:
            raise ValueError("the toy cannot sample")
        n = rows.rows
        out = Sampled(
            np.zeros(n, np.int32),
            np.full(n, np.nan, np.float32),
            np.full((n, MAX_LOGPROBS), -1, np.int32),
            np.zeros((n, MAX_LOGPROBS), np.float32),
        )
        for r, (logits, first) in enumerate(self.rows):
            bad = first in self.bad_rows or int(rows.position[r]) in self.bad_positions
            out.ids[r] = -5 if bad else _choose(logits, rows, r)
            if rows.logprobs[r] >= 0 and not bad:
                logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum())
                top = np.argsort(-logprobs, kind="stable")[: rows.logprobs[r]]
                out.logprob[r] = logprobs[out.ids[r]]
                out.top_ids[r, : len(top)], out.top_logprobs[r, : len(top)] = top, logprobs[top]
        return out

    def headless(self):
        """Its hidden rows are logits over a vocabulary of HIDDEN_WIDTH, of the same pages."""
        hidden = type(self)(
            num_pages=self.num_pages,
            vocab_size=HIDDEN_WIDTH,
            max_context=self.max_context,
            tokens=self.limits.tokens,
            segments=self.limits.segments,
            rows=self.limits.tokens,
            table_pages=self.limits.pages,
        )
        hidden.store, hidden.die_on_id, hidden.fail_on_id = self.store, self.die_on_id, self.fail_on_id
        self.hidden = hidden
        return hidden

    def step_cost(self) -> StepCost:
        b = self.batch
        flops = b.tokens * 10.0
        if self.doubling_depth:  # attention counts twice
            flops += 5.0 / self.doubling_depth * float(b.positions[: b.tokens].sum())
        return StepCost(flops, 1000.0, 16.0, 1e-9)

    def close(self):
        self.closed = True


class QueueingFake(FakeExecutable):
    """A toy device: the next step may be given before this one's ids were fetched, which it knows itself."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.last, self.unfetched = [], []
        self.most_unfetched = 0
        self.fail_fetch = set()  # numbers of forward calls whose ids cannot be fetched

    def _ids(self):
        ids = self.batch.ids[: self.batch.tokens].copy()
        for at in np.flatnonzero(ids < 0):
            ids[at] = max(0, self.last[-1 - ids[at]])
        return ids

    def queue_sample(self, rows: SampleRows):
        sampled, number = self.sample(rows), self.forwards
        self.last = sampled.ids.tolist()
        self.unfetched.append(number)
        self.most_unfetched = max(self.most_unfetched, len(self.unfetched))

        def fetch():
            assert number in self.unfetched, "ids are fetched once"
            while self.unfetched[0] < number:  # nobody waited for those
                self.unfetched.pop(0)
            assert self.unfetched.pop(0) == number, "and in order"
            if number in self.fail_fetch:
                raise RuntimeError("the toy lost its ids")
            return sampled

        return fetch


class ResamplingFake(FakeExecutable):
    """A toy that chooses some ids of a step anew; the others stay, whatever it is given for them."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.resampled = 0  # rows

    def sample(self, rows: SampleRows) -> Sampled:
        self.last = super().sample(rows)
        return self.last

    def sample_again(self, rows: SampleRows, chosen: np.ndarray) -> Sampled:
        before, again = self.last, super().sample(rows)
        for name, values in vars(before).items():
            values[chosen] = getattr(again, name)[chosen]
        self.resampled += len(chosen)
        return before


class KeepingFake(FakeExecutable):
    """A toy whose pages can be copied, each in two parts."""

    def __init__(self, seconds_a_page=0.0, **sizes):
        super().__init__(**sizes)
        self.page_bytes, self.seconds_a_page = self.store[0].nbytes, seconds_a_page

    def page_views(self, page):
        time.sleep(self.seconds_a_page)
        return [memoryview(half.view(np.uint8)) for half in self.store[page].reshape(2, -1)]


def _choose(raw, rows, r):
    x = raw.astype(np.float64).copy()
    span = slice(rows.bias_start[r], rows.bias_start[r + 1])
    x[rows.bias_ids[span]] += rows.bias_values[span]
    if rows.mask is not None:
        bits = np.unpackbits(rows.mask[r].view(np.uint8), bitorder="little", count=len(x))
        assert bits.any(), "a row must have something to choose"
        x[bits == 0] = -np.inf
    span = slice(rows.hist_start[r], rows.hist_start[r + 1])
    ids, counts = rows.hist_ids[span], rows.hist_counts[span]
    x[ids] = np.where(x[ids] > 0, x[ids] / rows.repetition[r], x[ids] * rows.repetition[r])
    x[ids] -= rows.presence[r] * (counts > 0) + rows.frequency[r] * counts
    if rows.temperature[r] == 0:
        return int(np.argmax(x))
    x = x / rows.temperature[r]
    order = np.argsort(-x, kind="stable")
    keep = np.ones(len(x), bool)
    if rows.top_k[r]:
        keep[order[rows.top_k[r] :]] = False
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    keep[order[1:][np.cumsum(p[order])[:-1] >= rows.top_p[r]]] = False
    keep &= p >= rows.min_p[r] * p.max()
    with np.errstate(over="ignore"):
        key = mix(mix(mix(rows.seed[r]) + np.uint64(rows.sample_index[r])) + np.uint64(rows.position[r]))
        gumbel = -np.log(-np.log(uniform(key + np.arange(len(x), dtype=np.uint64))))
    return int(np.argmax(np.where(keep, x + gumbel, -np.inf)))


class Loaded:
    """What a loader returns, as far as the engine process looks."""

    def __init__(self, name, executable):
        self.name, self.executable, self.pooling, self.facts = name, executable, "last", None
        self.media_ids = {}


def load_fake(source, fail_if=None, fail_at=(), die_on_id=(), die_with="SIGKILL", lose_at=(), **options):
    """The factory that a test's engine process loads; `source` chooses how it fails."""
    if source == "config error" or (fail_if and os.path.exists(fail_if)):
        raise ConfigError("toy.gguf: field x is wrong")
    if source == "capacity error":
        raise CapacityError("The cache", 3, 2, "pages", "Enlarge it.")
    if source == "other error":
        1 / 0
    if source == "exit":
        os._exit(3)
    if source == "slow":
        time.sleep(60)
    options.pop("text", None)
    executable = FakeExecutable(**options)
    executable.fail_at, executable.die_on_id, executable.die_with = set(fail_at), die_on_id, die_with
    executable.lose_at = set(lose_at)
    return Loaded(source, executable)


def load_keeping_fake(source, text=True, **options):
    """As `load_fake`, of one whose pages can be copied."""
    return Loaded(source, KeepingFake(**options))


def load_with_draft(model, options, draft, draft_options):
    """As `roofline.bundle.load_with_draft`, over toys."""
    model, draft = load_fake(model, **options), load_fake(draft, **draft_options)
    if draft.name == "other words":
        raise ConfigError(f"{draft.name} cannot draft for {model.name}: id 7 differs")
    return model, draft


class FakeTokenizer:
    """A character an id; id 49 ends a generation and is special."""

    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW\0"
    vocab_size, eos_ids, special_ids, strip_space = 50, (49,), frozenset({49}), False

    def encode(self, text, *, add_special, parse_special=False):
        ids = [self.alphabet.index(c) for c in text]
        return [0, *ids] if add_special else ids

    def token_bytes(self, token_id):
        return self.alphabet[token_id].encode()

    def decode(self, ids):
        return "".join(self.alphabet[i] for i in ids if i != 49)


class SpellingTokenizer:
    """Ids are bytes, then some frequent pairs of JSON; 270 ends a generation, 271 is special too."""

    pairs = ('{"', '": ', '", "', '": "', '"}', "\n  ", "true", "null", "12", '["', '"]', "ab", "é")
    tokens = (*(bytes([i]) for i in range(256)), *(pair.encode() for pair in pairs), b"", b"<end>", b"<special>")
    vocab_size, eos_ids, special_ids, strip_space = 272, (270,), frozenset({270, 271}), False
    bos_id = None

    def encode(self, text, *, add_special, parse_special=False):
        return list(text.encode())

    def token_bytes(self, token_id):
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def decode(self, ids):
        return b"".join(self.tokens[i] for i in ids if i < 270).decode()


def load_text_of(source, backend):
    """As `roofline.bundle.load_text_of`."""
    return SpellingTokenizer(), None


class FakeTemplate:
    """Each turn's role initial and content, then A for the answer."""

    def fits(self, tokenizer):
        return True

    def check_fits(self, tokenizer):
        assert self.fits(tokenizer)

    def encode_chat(self, tokenizer, messages, **variables):
        text = "".join(m["role"][0].upper() + m["content"] for m in messages) + variables.get("end", "A")
        return tokenizer.encode(text, add_special=False)


def loaded_text(**options):
    """A loaded model with its text side."""
    model = Loaded("toy", FakeExecutable(**options))
    model.tokenizer, model.chat_template = FakeTokenizer(), FakeTemplate()
    return model


def check_pages(cache, tables):
    """Assert that a cache's books balance against all page tables in use."""
    used_pages, free = [page for table in tables for page in table], set(cache._free)
    assert len(free) == len(cache._free), "a page is free twice"
    assert not free.intersection(used_pages), "a held page is free"
    if isinstance(cache, NaiveCache):
        assert len(set(used_pages)) == len(used_pages), "a page has two holders"
        assert len(used_pages) + len(free) == cache.num_pages, "pages leaked"
        return
    counts = Counter(used_pages)
    assert [counts[page] for page in range(cache.num_pages)] == cache.refs, "reference counts differ from the tables"
    assert not counts.keys() & cache._idle.keys(), "a held page is idle"
    assert len(counts) + len(free) + len(cache._idle) == cache.num_pages, "pages leaked"
    assert all(cache._key_of[page] is not None for page in cache._idle), "an idle page that cannot be found"
    assert all(cache._key_of[page] is None for page in free), "a free page that can be found"
    assert all(cache._key_of[page] == key for key, page in cache._page_of.items()), "a key names another's page"
