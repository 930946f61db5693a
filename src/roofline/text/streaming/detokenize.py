"""Turns ids into text while they are generated."""

import codecs
from collections.abc import Iterable

from roofline.text.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Turns the ids of one answer into text, whole characters only.

    For any ids in any portions, the pushes and the flush joined are ``tokenizer.decode`` of all ids. Special tokens
    are left out; bytes that can never become a character give U+FFFD.

    Args:
        at_start: the ids begin a text, so SentencePiece's first space is dropped; False: they go on from a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = True) -> None:
        self._spell = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._drop_space = tokenizer.strip_space and at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        data = b"".join([self._spell(token_id) for token_id in ids if token_id not in self._skipped])
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD. Ends the text."""
        return self._decoder.decode(b"", final=True)
