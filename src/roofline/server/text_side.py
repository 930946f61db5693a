"""The served model's text, without its weights: tokenizer, chat template, stop strings."""

from collections.abc import Mapping, Sequence

from roofline import bundle
from roofline.text.streaming.stops import TextStream
from roofline.text.templates.template import ChatTemplate
from roofline.text.tokenizers.tokenizer import Tokenizer


class TextSide:
    """Strings to token ids and back, by a model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.eos_ids = tuple(tokenizer.eos_ids)

    def complete(self) -> None:
        """Build what was left for later: the first odd text need not wait for it then. Raises ConfigError."""
        self.tokenizer.complete()
        self.template.complete()

    def encode(self, text: str) -> list[int]:
        """Ids of a raw completion's prompt, with the model's beginning-of-sequence id where it wants one."""
        return self.tokenizer.encode(text, add_special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. Raises RequestError."""
        return self.template.encode_chat(self.tokenizer, messages)

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for."""
        return self.tokenizer.token_bytes(token)

    def stream(self, stop: Sequence[str], *, at_start: bool) -> TextStream:
        """A fresh stream of text that looks for `stop`; `at_start`: the ids do not go on from a text."""
        return TextStream(self.tokenizer, stop, at_start=at_start)


def load_text(model: str, backend: str = "cpu") -> TextSide:
    """Read the text side of a model by name or path, as its backend does. Raises ConfigError."""
    return TextSide(*bundle.load_text_of(model, backend))
