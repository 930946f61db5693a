"""Writes mask_numbers.json: what TRL trains on under its templates for training, and LLM Foundry under the models' own.

Needs TRL, transformers and torch, and the source of LLM Foundry (written with trl 1.16 and llm-foundry 0.22.0):
`python tests/train/write_mask_numbers.py FOUNDRY_SOURCE TEMPLATES...`. Each of TEMPLATES is NAME=FILE of a template
that TRL has none of, such as that of SmolLM2. LLM Foundry's own functions are run, without the packages that their
modules import beside them.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.train.template_cases import CHATS, TOKENS, write_words

CONSTANTS = ("_ALLOWED_", "_DEFAULT_", "_TARGET_", "_sequence_to_")  # how their names, and those of policies, begin
FUNCTIONS = {
    "llmfoundry/data/finetuning/tasks.py": (
        *("_get_key", "_validate_chat_formatted_example", "_slice_chat_formatted_example"),
        "_tokenize_chat_formatted_example",
    ),
    "llmfoundry/data/finetuning/collator.py": ("ensure_list", "stitch_turns_decoder_only"),
    "llmfoundry/data/utils.py": ("get_tokens_per_batch_func",),
}


class _Refused(Exception):
    """Stands for every exception of LLM Foundry's."""


def foundry(source: Path) -> Mapping[str, Any]:
    """LLM Foundry's functions for chats, and its count of the tokens of a batch."""
    import torch

    names: dict[str, Any] = {
        **{"torch": torch, "CROSS_ENTROPY_IGNORE_INDEX": -100, "ALLOWED_MESSAGES_KEYS": {"messages"}},
        **{"get_date_string": lambda: "", "Mapping": Mapping},
    }
    for path, functions in FUNCTIONS.items():
        tree = ast.parse((source / path).read_text())
        chosen = [node for node in tree.body if _name(node) in functions or _name(node).startswith(CONSTANTS)]
        used = (node.id for part in chosen for node in ast.walk(part) if isinstance(node, ast.Name))
        names |= {name: _Refused for name in used if name.endswith("Error") and not hasattr(builtins, name)}
        exec(compile(ast.Module(chosen, []), path, "exec"), names)  # annotations are left alone, as in this module
    return names


def _name(node: ast.stmt) -> str:
    """The name that a statement of a module defines."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef) else ""


def of_foundry(names: Mapping[str, Any], tokenizer: Any, chat: list[dict[str, str]]) -> dict[str, Any] | str:
    """The responses that it trains on, and what it counts of a padded batch of this sample and its first turn."""
    import torch

    try:
        turns = [names["_tokenize_chat_formatted_example"]({"messages": part}, tokenizer) for part in (chat, chat[:2])]
    except _Refused:
        return "refused"
    rows = [names["stitch_turns_decoder_only"](part["turns"], "none", "all") for part in turns]
    width = max(len(ids) for ids, _ in rows)
    batch = {
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }
    counts = names["get_tokens_per_batch_func"]()(batch)
    responses = [tokenizer.decode(list(turn["labels"])) for turn in turns[0]["turns"]]
    return {"responses": responses, "total": int(counts["total"]), "loss_generating": int(counts["loss_generating"])}


def of_trl(tokenizer: Any, template: str, chat: list[dict[str, str]]) -> list[str]:
    """The texts that the mask of assistants' tokens has."""
    rendered = tokenizer.apply_chat_template(
        chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    runs = groupby(zip(rendered["input_ids"], rendered["assistant_masks"], strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]


def main() -> None:
    import transformers
    import trl

    names, folder = foundry(Path(sys.argv[1])), Path(trl.__file__).with_name("chat_templates")
    extra = dict(word.split("=", 1) for word in sys.argv[2:])
    written: dict[str, Any] = {}
    for name in TOKENS:
        stock = Path(extra[name]) if name in extra else folder / f"{name}.jinja"
        template = stock.read_text("utf-8")
        place = write_words(Path(tempfile.mkdtemp()), name, template)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(place))
        training = folder / f"{name}_training.jinja"
        written[name] = {
            "template": template,
            "trl": {at: of_trl(tokenizer, training.read_text("utf-8"), chat) for at, chat in CHATS.items()}
            if training.exists() and name not in extra
            else None,
            "foundry": {at: of_foundry(names, tokenizer, chat) for at, chat in CHATS.items()},
        }
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    place = Path(__file__).with_name("mask_numbers.json")
    place.write_text(json.dumps({**versions, "templates": written}, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
