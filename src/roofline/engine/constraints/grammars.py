"""Grammars: the compiled constraints of one model, in a bounded cache; compiled in threads beside the steps."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from roofline.common.errors import RequestError, RooflineError, UnsupportedError
from roofline.engine.constraint import Constraint, refuse
from roofline.engine.constraints.library import (
    SlowFormError,
    Words,
    advance,
    cannot_compile,
    compiled,
    library_tokenizer,
    notation,
    try_out,
)
from roofline.engine.constraints.matcher import Matcher
from roofline.engine.constraints.vetting import Vetting

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from llguidance import LLMatcher, LLTokenizer

    from roofline.text.tokenizers.tokenizer import Tokenizer

THREADS = 2  # that compile: one waits for the process that tries constraints out
MAX_GRAMMARS = 32  # that are kept; each has an automaton of at most some 50 MB, most of less than one
MAX_PENDING = 32  # that are being compiled or wait for it; more are refused
MAX_BYTES = 1 << 20  # of their texts
SLOW_SECONDS = 30.0  # for which a constraint that took too long is refused without another trial
_WITHOUT_TRIAL = frozenset({"json", "choice"})  # take a time that grows with their size alone


class Grammar:
    """A compiled constraint. `failed`: one of its matchers did, so no further answer begins with it."""

    def __init__(self, prototype: "LLMatcher", words: Words, tokenizer: "LLTokenizer") -> None:
        self._prototype, self._words, self._tokenizer, self.failed = prototype, words, tokenizer, False

    def matcher(self, stop_ids: Collection[int], min_tokens: int, ignore_eos: bool, begun: str = "") -> Matcher:
        """For a fresh answer: the ids that end it, how many tokens it shall have at least, whether it goes on behind
        the model's own end ids, and what it goes on from. Raises RequestError where that does not have the form."""
        state, ends = self._prototype.deep_copy(), tuple(self._words.ends)
        if begun:
            try:
                advance(state, self._tokenizer, self._words, begun)
            except ValueError as error:
                thinks = begun.lstrip().startswith("<think>")
                remedy = ". With --reasoning-parser think a server takes it for reasoning, which has no form"
                refuse(f"the answer goes on from a beginning, and {error}{remedy if thinks else ''}")
        return Matcher(self, state, (*ends, *stop_ids), min_tokens, ends if ignore_eos else ())


class Grammars:
    """Compiles constraints. Any thread may ask.

    Args:
        tokenizer: gives the model's; called once, in a thread, when the first constraint comes. None: there is none.
        vocab_size: ids of the model.
    """

    def __init__(self, tokenizer: "Callable[[], Tokenizer] | None", vocab_size: int) -> None:
        self._load, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._grammars: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()  # the latest used last
        self._pool: ThreadPoolExecutor | None = None
        self._library: tuple[Words, LLTokenizer, Vetting] | None = None
        self._library_lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._grammars)

    def begin(self, constraint: Constraint) -> "Future[Grammar]":
        """Its grammar, when it is compiled; raises RequestError 400 then, where it cannot be. What the answer goes on
        from is the matcher's alone."""
        constraint = replace(constraint, begun="") if constraint.begun else constraint
        from concurrent.futures import ThreadPoolExecutor  # 10 ms to import

        with self._lock:
            if self._closed:
                raise RooflineError("the engine is closed")
            future = self._grammars.get(constraint)
            if future is not None and _spent(future):
                future = None
            if future is None and sum(not each.done() for each in self._grammars.values()) >= MAX_PENDING:
                return _overloaded()
            if future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="roofline-grammars")
                future = self._grammars[constraint] = self._pool.submit(self._compile, constraint)
            self._grammars.move_to_end(constraint)
            self._evict()
            return future

    def close(self) -> None:
        """Compile nothing any more."""
        with self._lock:
            self._closed = True
            self._grammars.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._library is not None:
            self._library[2].close()

    def _evict(self) -> None:
        size = sum(len(constraint.text) for constraint in self._grammars)
        for constraint, future in list(self._grammars.items()):
            if len(self._grammars) <= MAX_GRAMMARS and size <= MAX_BYTES:
                return
            if future.done():  # answers that use it keep it
                del self._grammars[constraint]
                size -= len(constraint.text)

    def _compile(self, constraint: Constraint) -> Grammar:
        try:
            words, tokenizer, vetting = self._prepared()
            text = notation(constraint)
            if constraint.kind not in _WITHOUT_TRIAL:
                vetting.check(text)
            matcher = compiled(tokenizer, text)
            try_out(matcher, self._vocab_size, words.ends)  # its masks are in the automaton afterwards
        except UnsupportedError as error:
            raise _unsupported(str(error)) from error
        except ValueError as error:
            cannot_compile(constraint, error)
        return Grammar(matcher, words, tokenizer)

    def _prepared(self) -> "tuple[Words, LLTokenizer, Vetting]":
        with self._library_lock:
            if self._library is None:
                if self._load is None:
                    raise _unsupported("this engine was made without a tokenizer, so it knows no text")
                tokenizer = self._load()
                words = Words.of(tokenizer, self._vocab_size)
                encode = tokenizer.encode
                library = library_tokenizer(words, lambda text: encode(text, add_special=False))
                self._library = words, library, Vetting(words)
            return self._library


def _overloaded() -> "Future[Grammar]":
    from concurrent.futures import Future

    future: Future[Grammar] = Future()
    problem = f"constraint: {MAX_PENDING} others are waiting to be compiled; try again in a moment"
    future.set_exception(RequestError(429, "overloaded", problem, param="constraint"))
    return future


def _unsupported(problem: str) -> RequestError:
    return RequestError(400, "unsupported_parameter", f"constraint: {problem}", param="constraint")


def _spent(future: "Future[Grammar]") -> bool:
    """Whether it must be compiled anew: it failed for a reason that is not its own, or for a time that another trial
    may not take, or one of its matchers failed."""
    if not future.done():
        return False
    if future.cancelled():
        return True
    error = future.exception()
    if error is None:
        return future.result().failed
    if isinstance(error.__cause__, SlowFormError):
        return time.monotonic() - error.__cause__.at > SLOW_SECONDS
    return not isinstance(error, RequestError)
