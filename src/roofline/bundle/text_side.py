"""The tokenizer and the chat template that belong to a checkpoint, or that lie in a folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields, has_type, naming
from roofline.common.files import read_regular
from roofline.common.json_files import read_json_file
from roofline.common.json_types import JsonObject

if TYPE_CHECKING:
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint

_MAX_TEMPLATE = 1 << 22  # bytes


def text_of_folder(path: Path) -> "tuple[Tokenizer, ChatTemplate]":
    """Those of the files that Hugging Face writes beside the weights. Raises ConfigError where there are none."""
    from roofline.text.tokenizers import from_json, from_older
    from roofline.weights.sources import find_tokenizer_files

    files = find_tokenizer_files(path)
    if "tokenizer.json" not in files and from_older.older_file(files) is None:
        raise ConfigError(f"{path}: there is no tokenizer.json beside the weights; save the tokenizer there")
    settings: JsonObject = {}
    for name in ("generation_config.json", "tokenizer_config.json"):
        if name in files:
            values = read_json_file(files[name])
            from_json.check_settings(Fields(files[name], values))
            settings |= values
    source = _template(Fields(files.get("tokenizer_config.json", path), settings))
    if "chat_template.jinja" in files:
        source = _text(files["chat_template.jinja"])
    if "tokenizer.json" in files:
        return with_template(from_json.from_json(files["tokenizer.json"], settings), source)
    named = Fields(files.get("tokenizer_config.json", path), settings)
    return with_template(from_older.from_older(files, named), source)


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
    """The tokenizer and chat template that belong to a checkpoint. Raises ConfigError where there is no tokenizer, or
    one that writes ids for which the model has no row."""
    folder = checkpoint.path if checkpoint.path.is_dir() or checkpoint.kind == "gguf" else checkpoint.path.parent
    with naming(folder):
        words = _words(checkpoint)
    rows, largest = checkpoint.config["vocab"], max(words[0].vocab_size - 1, *words[0].eos_ids, 0)
    if largest >= rows:
        what = f"its tokenizer has an id {largest}, its embedding {rows} rows"
        raise ConfigError(f"{checkpoint.path}: {what}: the two are of different models")
    return words


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

    bos = tokenizer.token_bytes(tokenizer.bos_id).decode(errors="replace") if tokenizer.bos_id is not None else ""
    eos = tokenizer.token_bytes(tokenizer.eos_ids[0]).decode(errors="replace") if tokenizer.eos_ids else ""
    return tokenizer, ChatTemplate(source, bos_token=bos, eos_token=eos)
