"""Counts the tokens of answers again after the load, with the model's tokenizer: no server is taken at its word."""

from typing import TYPE_CHECKING

from roofline.bench.load.events import Events
from roofline.bench.results.metrics import answer_tokens
from roofline.bench.results.window import measured
from roofline.common.errors import RooflineError

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

TOLERANCE = 0.1  # of a count; a text that is encoded again may have other tokens than the model chose
LEAST = 2  # tokens that any answer may differ by, such as one that ends it and has no text


def tokenizer_of(model: str) -> "Tokenizer | None":
    """The tokenizer of a model that is here, None of a shape without one."""
    from roofline.bundle.loader import load_text_of

    try:
        return load_text_of(model)[0]
    except RooflineError:
        return None


def miscounted(events: Events, tokenizer: "Tokenizer | None") -> int | None:
    """How many completed answers have another number of tokens than the server says, by more than TOLERANCE; None
    where there is no tokenizer. The texts of all but probes are dropped: they are not needed any more."""
    count = None
    if tokenizer is not None:
        count = 0
        for request in measured(events):
            if request.completed and request.text is not None and request.first_reasoning is None:
                reported, here = answer_tokens(request), len(tokenizer.encode(request.text, add_special=False))
                count += abs(reported - here) > max(LEAST, TOLERANCE * reported)
    for request in measured(events):
        request.text = None
    return count
