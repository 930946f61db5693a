"""What llguidance is asked for: its tokenizer, a constraint in its notation, and a compiled matcher within limits.

The engine uses it in threads, and a process of its own that tries each constraint first (vetting.py).
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast

from roofline.common.errors import ConfigError, RequestError
from roofline.common.extras import named_packages
from roofline.engine.constraint import Constraint, refuse
from roofline.engine.constraints.schemas import for_library, grammar_for_library, grammar_of_schema

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    from roofline.text.tokenizers.tokenizer import Tokenizer

# In llguidance's own units: masks of some 10 ms of a core, an automaton of some 50 MB.
STEP_FUEL, STEP_ITEMS, LEXER_STATES = 100_000, 20_000, 25_000
WALKS, WALK_TOKENS = 2, 32  # of the trial that a compiled constraint passes
WALK_MEAN_SECONDS = 0.02  # of the processor, for each mask of that trial: slower ones would hold everybody up
_METACHARACTERS = frozenset("\\.+*?()|[]{}^$#&-~/<>\"'@!%:=,;` ")
_ONE_OF = (
    "oneOf: several of its parts may be valid at once, and an answer cannot be held to one alone; use anyOf, or give "
    "the parts other types, or a required property with another const in each"
)
_MOST_ERROR = 300  # characters of what the library says


class SlowFormError(ValueError):
    """A constraint took more time than it may, at `at` (of time.monotonic); another trial may take less."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.at = time.monotonic()


@dataclass(frozen=True)
class Words:
    """A vocabulary as llguidance takes it: the bytes of each id, which ids are special, and which end an answer."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]

    @classmethod
    def of(cls, tokenizer: "Tokenizer", size: int) -> "Words":
        """Those of a tokenizer; size: ids of the model, which may have more than the tokenizer, or fewer.

        Raises ConfigError where no id ends an answer.
        """
        ends = [token for token in tokenizer.eos_ids if token < size]
        if not ends:
            raise ConfigError(
                "the model's tokenizer has no id that ends an answer, so an answer cannot be held to a form"
            )
        special = sorted(token for token in tokenizer.special_ids if token < size)
        return cls([tokenizer.token_bytes(token) for token in range(size)], special, ends)


class _Wrapper:
    """The attributes that llguidance reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, words: Words, encode: Callable[[str], Sequence[int]] | None) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = words.tokens, words.special, words.ends[0]
        self.greedy: Callable[[str], Sequence[int]] = lambda text: []
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of a text that the grammar leaves no choice about."""
        ids = self._encode(text) if self._encode is not None else []
        spelled = b"".join(self.tokens[token] for token in ids if token < len(self.tokens))
        # A tokenizer may put a space in front, normalise, or have an id that the model has not: then the longest
        # tokens are taken one by one.
        return list(ids if spelled == text.encode("utf-8") else self.greedy(text))


def library_tokenizer(words: Words, encode: Callable[[str], Sequence[int]] | None = None) -> "LLTokenizer":
    """Tables of a vocabulary, a fifth of a second. encode: how the model would spell a text; called in any thread.

    Raises UnsupportedError where llguidance is not installed.
    """
    with named_packages():
        from llguidance import LLTokenizer

    wrapper = _Wrapper(words, encode)
    tokenizer = LLTokenizer(cast("TokenizerWrapper", wrapper), eos_token=words.ends)
    wrapper.greedy = tokenizer.greedy_tokenize
    return tokenizer


def notation(constraint: Constraint) -> str:
    """A constraint in llguidance's notation, without its beginning. Raises ValueError."""
    text = _notation_of_form(constraint)
    if not constraint.behind:
        return text
    form = json.loads(text)["grammars"][0] if text.lstrip().startswith("{") else {"lark_grammar": text}
    rules = ("start: before GAP @form", f"before[suffix={json.dumps(constraint.behind)}]: /(.|\\n)*/")
    outer = "\n".join((*rules, "GAP: /[ \\t\\r\\n]{0,64}/"))
    return json.dumps({"grammars": [{"lark_grammar": outer}, form | {"name": "form"}]}, ensure_ascii=False)


def _notation_of_form(constraint: Constraint) -> str:
    from llguidance import LLMatcher, regex_to_lark

    text: str
    match constraint.kind:
        case "json" | "json_schema":
            schema = json.loads(constraint.text or '{"type":"object"}')
            text = grammar_of_schema(schema) or LLMatcher.grammar_from_json_schema(
                json.dumps(for_library(schema), ensure_ascii=False)
            )
        case "regex":
            # As in most languages, \d is 0 to 9; \w and \s are Unicode's.
            text = f"start: /{regex_to_lark(_anchored(constraint.text), use_ascii='d')}/"
        case "choice":
            text = LLMatcher.grammar_from_regex("|".join(f"({_literal(each)})" for each in constraint.choices()))
        case "lark":
            if constraint.text.lstrip().startswith("{"):  # the library would read its own JSON
                raise ValueError("it begins with a brace, as no rule does")
            text = grammar_for_library(constraint.text)
    return text


def compiled(tokenizer: "LLTokenizer", text: str) -> "LLMatcher":
    """The matcher of a constraint in llguidance's notation, in its initial state; the interpreter is free meanwhile.

    Raises ValueError with the reason where there is none.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, max_lexer_states=LEXER_STATES, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(_shortened(matcher.get_error()))
    warnings = matcher.get_grammar_warnings()
    if warnings:  # something of it would not be kept
        raise ValueError(_shortened(warnings[0]))
    return matcher


def try_out(matcher: "LLMatcher", vocab_size: int, ends: Sequence[int]) -> None:
    """Walk through a few answers. Raises ValueError where there is no answer, SlowFormError where its masks take too
    long."""
    import numpy as np

    mask = np.zeros(-(-vocab_size // 32), np.uint32)  # [words]
    chance, masks, started = random.Random(0), 0, time.thread_time()
    for _ in range(WALKS):
        walker = matcher.deep_copy()
        for _ in range(WALK_TOKENS):
            fill(walker, mask)
            masks += 1
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed[list(ends)] = 0  # differences of sets of ids would cost more than the mask: 0.3 s of 200,000
            going_on = np.flatnonzero(allowed)
            if not going_on.size:
                break
            walker.consume_token(int(going_on[chance.randrange(going_on.size)]))
            if walker.is_error():
                raise ValueError(_shortened(walker.get_error()))
            if walker.is_stopped():
                break
    mean = (time.thread_time() - started) / masks
    if mean > WALK_MEAN_SECONDS:
        raise SlowFormError(f"finding the ids that may come next takes {mean * 1e3:.0f} ms; simplify it")


def advance(matcher: "LLMatcher", tokenizer: "LLTokenizer", words: Words, begun: str) -> None:
    """Take a beginning of the answer. Raises ValueError where it does not have the form, or nothing can follow it."""
    ids = tokenizer.greedy_tokenize(begun)
    count = matcher.try_consume_tokens(ids)
    if matcher.is_error():
        raise ValueError(_shortened(matcher.get_error()))
    if count < len(ids):
        before, at_fault = (b"".join(words.tokens[token] for token in part) for part in (ids[:count], ids[count:]))
        place = f"behind {before.decode('utf-8', 'replace')[-20:]!r}" if before else "first"
        raise ValueError(f"it does not have the form: {at_fault.decode('utf-8', 'replace')[:20]!r} cannot come {place}")
    if matcher.is_stopped():
        raise ValueError("it has the form already, and nothing can follow it")


def fill(matcher: "LLMatcher", mask: "np.ndarray") -> None:
    """Write the bits of the ids that may come next, uint32 [words]. Raises ValueError where that cannot be known."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise ValueError(_shortened(matcher.get_error()))
    if not mask.any():
        raise ValueError("no id may come next")


def cannot_compile(constraint: Constraint, reason: ValueError) -> NoReturn:
    """Raise the error of a constraint that the library does not take."""
    try:
        refuse(f"the {constraint.name} cannot be compiled: {reason}")
    except RequestError as error:
        raise error from reason


def _anchored(regex: str) -> str:
    """A regex that is matched from beginning to end anyway, without the anchors that say so."""
    if regex.startswith("^"):
        regex = regex[1:]
    backslashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and backslashes % 2 == 0 else regex


def _literal(text: str) -> str:
    """A regex that matches a text alone."""
    return "".join(f"\\x{{{ord(c):x}}}" if c in _METACHARACTERS or not c.isprintable() else c for c in text)


def _shortened(message: str) -> str:
    """The first line of what the library says, without the grammar that it repeats; with the cause behind a colon."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    text = lines[0] if lines else "the library does not say why"
    cause = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    text = f"{text} {cause}" if cause and text.endswith(":") else text
    text = "nothing satisfies it" if text.startswith("NoExtension") else text
    text = _ONE_OF if text.startswith("oneOf constraints") else text
    return text if len(text) <= _MOST_ERROR else text[:_MOST_ERROR] + "..."
