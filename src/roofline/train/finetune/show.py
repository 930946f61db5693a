"""Shows samples as the model reads them: their tokens, and which are trained on."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from roofline.train.finetune.encode import Encoded

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

OPEN, CLOSE = "[[", "]]"  # around what is trained on, where there are no colours
_FURTHER = (("<<<", ">>>"), ("{{{", "}}}"), ("⟦", "⟧"))  # the first that a text has not, where it has those
_TRAINED, _CONTEXT = ("\x1b[30;42m", "\x1b[30;102m"), ("\x1b[90m", "\x1b[37m")  # tokens alternate between two shades
_PLAIN = "\x1b[0m"


def marked(tokenizer: "Tokenizer", sample: Encoded, colour: bool) -> str:
    """The text of a sample. With colour each token has a shade of its own, green where it is trained on; without, what
    is trained on stands between double brackets, or between other ones where the text has double brackets itself."""
    if colour:
        return "".join(_coloured(tokenizer, sample))
    runs = groupby(zip(sample.ids.tolist(), sample.trained.tolist(), strict=True), key=lambda pair: pair[1])
    parts = [(trained, _text(tokenizer, [token for token, _ in run])) for trained, run in runs]
    shown_text = "".join(text for _, text in parts)
    marks = ((OPEN, CLOSE), *_FURTHER)
    begin, end = next((pair for pair in marks if not any(mark in shown_text for mark in pair)), marks[-1])
    return "".join(f"{begin}{text}{end}" if trained else text for trained, text in parts)


def _coloured(tokenizer: "Tokenizer", sample: Encoded) -> Iterator[str]:
    """Tokens that have parts of a character are shown together."""
    pending, place = list[int](), 0
    for at, (token, trained) in enumerate(zip(sample.ids.tolist(), sample.trained.tolist(), strict=True)):
        pending.append(token)
        text = _text(tokenizer, pending)
        if text.endswith("\ufffd") and at + 1 < len(sample):
            continue
        shade = (_TRAINED if trained else _CONTEXT)[place % 2]
        # A line is coloured by itself: terminals fill the rest of a line that breaks in a background.
        yield "\n".join(f"{shade}{line}{_PLAIN}" if line else "" for line in text.split("\n"))
        pending, place = [], place + 1


def _text(tokenizer: "Tokenizer", ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8", "replace")
