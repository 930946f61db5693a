"""The tokenizer and the chat template that belong to a checkpoint, or that lie in a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields, has_type, naming
from roofline.common.files import read_regular
from roofline.common.json_files import read_json_file

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint

_MAX_TEMPLATE = 1 << 22  # bytes


def text_of_folder(path: Path) -> "tuple[Tokenizer, ChatTemplate]":
    """Those of the files that Hugging Face writes beside the weights. Raises ConfigError where there are none."""
    from roofline.text.tokenizers import folder_settings, from_json, from_older
    from roofline.weights.sources import find_tokenizer_files

    files = find_tokenizer_files(path)
    if "tokenizer.json" not in files and from_older.older_file(files) is None:
        remedy = "save the tokenizer there, which texts need with random weights, too"
        raise ConfigError(f"{path}: there is no tokenizer.json beside the weights or the configuration; {remedy}")
    settings = folder_settings.read_settings(files)
    source = _template(Fields(files.get("tokenizer_config.json", path), settings))
    if "chat_template.jinja" in files:
        source = _text(files["chat_template.jinja"])
    elif source is None and "chat_template.json" in files:  # of the processor of a model that reads more than text
        older = files["chat_template.json"]
        source = Fields(older, read_json_file(older)).need("chat_template", str)
    if "tokenizer.json" in files:
        defaults = folder_settings.default_tokens(files, settings)
        return with_template(from_json.from_json(files["tokenizer.json"], settings, defaults), source)
    tokenizer_config = Fields(files.get("tokenizer_config.json", path), settings)
    return with_template(from_older.from_older(files, tokenizer_config), source)


def _template(settings: Fields) -> str | None:
    """The chat template of a tokenizer_config.json, which may list several by name."""
    if not has_type(settings.values.get("chat_template"), list):
        return settings.get("chat_template", str)
    templates = settings.objects("chat_template")
    return next((t.need("template", str) for t in templates if t.get("name", str) == "default"), None)


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from error


def load_text(checkpoint: "Checkpoint") -> "tuple[Tokenizer, ChatTemplate]":
    """The tokenizer and chat template that belong to a checkpoint. Raises ConfigError where there is no tokenizer.

    The tokenizer may have ids for which the model has no row: they are refused where a request has one. Ends of
    answers are none of them, because the model cannot say them.
    """
    folder = checkpoint.path if checkpoint.path.is_dir() or checkpoint.kind == "gguf" else checkpoint.path.parent
    with naming(folder):
        tokenizer, template = _words(checkpoint)
    tokenizer.limit_ends(checkpoint.config["vocab"])
    return tokenizer, template


def _words(checkpoint: "Checkpoint") -> "tuple[Tokenizer, ChatTemplate]":
    from roofline.text.tokenizers import from_gguf

    if checkpoint.kind == "gguf":
        tokenizer = from_gguf.from_gguf(checkpoint.metadata, checkpoint.path)
        source = Fields(checkpoint.path, checkpoint.metadata).get("tokenizer.chat_template", str)
        return with_template(tokenizer, source)
    return text_of_folder(checkpoint.path)


def with_template(tokenizer: "Tokenizer", source: str | None) -> "tuple[Tokenizer, ChatTemplate]":
    """A tokenizer and the chat template that goes with it; source: Jinja, None for the default."""
    from roofline.text.templates.template import ChatTemplate

    bos = tokenizer.token_string(tokenizer.bos_id) if tokenizer.bos_id is not None else ""
    eos = tokenizer.token_string(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
    return tokenizer, ChatTemplate(source, bos_token=bos, eos_token=eos)
