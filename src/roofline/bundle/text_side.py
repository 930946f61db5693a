"""The tokenizer and the chat template that belong to a checkpoint, or that lie in a folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint


def text_of_folder(path: Path) -> "tuple[Tokenizer, ChatTemplate]":
    """Those of the files that Hugging Face writes beside the weights. Raises ConfigError where there are none."""
    from roofline.text.tokenizers import from_json
    from roofline.weights.sources import find_tokenizer_files

    files = find_tokenizer_files(path)
    if "tokenizer.json" not in files:
        raise ConfigError(f"{path}: there is no tokenizer.json beside the weights; save the tokenizer there")
    settings: JsonObject = {}
    for name in ("generation_config.json", "tokenizer_config.json"):
        if name in files:
            try:
                settings |= json.loads(files[name].read_bytes())
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{files[name]} is not a JSON object: {error}") from error
    source = settings.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if "chat_template.jinja" in files:
        source = files["chat_template.jinja"].read_text("utf-8")
    return with_template(from_json.from_json(files["tokenizer.json"], settings), source)


def load_text(checkpoint: "Checkpoint") -> "tuple[Tokenizer, ChatTemplate]":
    """The tokenizer and chat template that belong to a checkpoint. Raises ConfigError where there is no tokenizer."""
    from roofline.text.tokenizers import from_gguf

    if checkpoint.kind == "gguf":
        tokenizer = from_gguf.from_gguf(checkpoint.metadata)
        return with_template(tokenizer, checkpoint.metadata.get("tokenizer.chat_template"))
    return text_of_folder(checkpoint.path)


def with_template(tokenizer: "Tokenizer", source: str | None) -> "tuple[Tokenizer, ChatTemplate]":
    """A tokenizer and the chat template that goes with it; source: Jinja, None for the default."""
    from roofline.text.templates.template import ChatTemplate

    bos = tokenizer.token_bytes(tokenizer.bos_id).decode() if tokenizer.bos_id is not None else ""
    eos = tokenizer.token_bytes(tokenizer.eos_ids[0]).decode() if tokenizer.eos_ids else ""
    return tokenizer, ChatTemplate(source, bos_token=bos, eos_token=eos)
