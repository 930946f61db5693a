"""The served model's text, without its weights: tokenizer, chat template, stop strings."""

from collections.abc import Mapping, Sequence

from roofline import bundle
from roofline.text.streaming.stops import TextStream
from roofline.text.templates.template import ChatTemplate
from roofline.text.tokenizers.tokenizer import Tokenizer


class TextOfModel:
    """A tokenizer and a chat template as `facade.TextSide`."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.eos_ids = tuple(tokenizer.eos_ids)

    def complete(self) -> None:
        """Build what was left for later: the first odd text need not wait for it then. Raises ConfigError."""
        self.tokenizer.complete()
        self.template.complete()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.template.encode_chat(self.tokenizer, messages)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def stream(self, stop: Sequence[str], *, at_start: bool) -> TextStream:
        return TextStream(self.tokenizer, stop, at_start=at_start)


def load_text(model: str, backend: str = "cpu") -> TextOfModel:
    """Read the text side of a model by name or path, as its backend does. Raises ConfigError."""
    return TextOfModel(*bundle.load_text_of(model, backend))
