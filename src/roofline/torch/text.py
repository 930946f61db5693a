"""The text side of a transformers tokenizer in memory."""

from roofline.bundle import with_template
from roofline.common.errors import UnsupportedError
from roofline.text.templates.template import ChatTemplate
from roofline.text.tokenizers.from_json import from_json
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.torch.checkpoint import PretrainedTokenizer


def text_of(tokenizer: PretrainedTokenizer, eos_ids: tuple[int, ...] = ()) -> tuple[Tokenizer, ChatTemplate]:
    """Our tokenizer and chat template of one of transformers'.

    Args:
        tokenizer: one over the `tokenizers` library ("fast").
        eos_ids: further ids that end an answer.

    Raises:
        UnsupportedError: a tokenizer in Python, or with a model that we do not have.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        what = f"the tokenizer {type(tokenizer).__name__}"
        raise UnsupportedError(what, "it has no tokenizer.json", ("AutoTokenizer.from_pretrained(..., use_fast=True)",))
    # Whether ids are put around a text is in the backend's own post-processor, as it is now.
    settings = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "eos_token_id": eos_ids}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    return with_template(from_json(backend.to_str().encode(), settings), template)
