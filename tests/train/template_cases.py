"""Chats, and the special tokens of chat templates, for `write_mask_numbers.py` and the test of what it wrote."""

import json
from pathlib import Path
from typing import Any

from tests.train import sft

# Of each template: its special tokens, and those of them that a server stops at, its end of a text first.
TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "qwen2_5": (["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (["<|im_start|>", "<think>", "</think>"], ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_instruct_2507": (["<|im_start|>"], ["<|im_end|>", "<|endoftext|>"]),
    "smollm2": (["<|im_start|>"], ["<|im_end|>"]),
    "llama3": (["<|start_header_id|>", "<|end_header_id|>"], ["<|eot_id|>", "<|end_of_text|>"]),
    "mistral": (["[INST]", "[/INST]"], ["</s>"]),
    "gemma": (["<start_of_turn>"], ["<eos>", "<end_of_turn>"]),
    "gemma3": (["<start_of_turn>"], ["<eos>", "<end_of_turn>"]),
    "phi3": (["<|user|>", "<|system|>"], ["<|endoftext|>", "<|end|>", "<|assistant|>"]),
    "phi3_5": (["<|user|>", "<|system|>"], ["<|endoftext|>", "<|end|>", "<|assistant|>"]),
    "glm4moe": (
        ["[gMASK]", "<sop>", "<|assistant|>", "<|system|>", "<think>", "</think>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "deepseekv3": (["<｜User｜>", "<｜Assistant｜>"], ["<｜end▁of▁sentence｜>"]),
    "cohere": (
        ["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"],
        ["<|END_OF_TURN_TOKEN|>"],
    ),
    "deepseek_r1_distill": (["<｜User｜>", "<｜Assistant｜>"], ["<｜end▁of▁sentence｜>"]),
    "nemotron_3_nano": (["<|im_start|>", "<think>", "</think>"], ["<|im_end|>"]),
    "lfm2": (["<|im_start|>"], ["<|im_end|>"]),
}
BOS = "<s>"
CHATS: dict[str, list[dict[str, str]]] = {
    "one": [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "It is two."}],
    "turns": [
        {"role": "user", "content": "What is one?"},
        {"role": "assistant", "content": "It is two."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": "three\n\nfour"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome"},
    ],
}


def write_words(folder: Path, name: str, template: str) -> Path:
    """A tokenizer of the template's special tokens, in a folder as transformers and Roofline read it."""
    specials, ends = TOKENS[name]
    settings: dict[str, Any] = {"bos_token": BOS, "eos_token": ends[0]}
    place = sft.write_tokenizer(folder, template, specials=[*specials, *ends, BOS], settings=settings)
    ids = [len(specials) + at for at in range(len(ends))]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return place
