"""A small model with recurrent state on disk, as Hugging Face writes it, with a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

from tests.bundle.bundle_models import TEMPLATE, tokenizer_json
from tests.models.parity_cases import CASES, theirs

CONFIG: dict[str, Any] = CASES["qwen3_5_groups"].config | {"vocab": 300}


def write_recurrent(folder: Path, **fields: Any) -> Path:
    """The folder with the model. fields: of our configuration, other than those of CONFIG."""
    model = theirs(CONFIG | fields)
    model.config.bos_token_id, model.config.eos_token_id = 256, 257
    model.save_pretrained(folder)
    return write_words(folder)


def write_words(folder: Path) -> Path:
    """The folder with a tokenizer of bytes."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
