"""Small models on disk, with a tokenizer, for the tests of bundles."""

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "expansion_ratio": 4,
    "max_seq_len": 512,
    "vocab_size": 300,
}
MPT: dict[str, dict[str, Any]] = {
    "learned": _MPT | {"no_bias": False, "learned_pos_emb": True, "attn_config": {"alibi": False}},
    "alibi": _MPT | {"no_bias": True, "learned_pos_emb": False, "attn_config": {"alibi": True}},
    "rope": _MPT
    | {
        "no_bias": False,
        "norm_type": "low_precision_rmsnorm",
        "attn_config": {"rope": True, "alibi": False, "attn_type": "grouped_query_attention", "kv_n_heads": 2},
        "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 96, "ffn_act_fn": {"name": "silu"}},
    },
}

# Numbers of code.bin that say it is not for this build, or damaged: where, what stands there, what is said.
FOREIGN_CODE = (
    (8, 0x0807060504030201, "other byte order"),
    (16, 9, "format 9"),
    (24, 77, "layout 77"),
    (32, 78, "code 78"),
    (0, 1, "not the code of a bundle"),
    (328, -5, "checksum"),
)


def byte_alphabet() -> list[str]:
    from roofline.text.tokenizers.vocabulary import byte_alphabet as alphabet

    return [character for character, _ in sorted(alphabet().items(), key=lambda pair: pair[1])]


def tokenizer_json() -> dict[str, Any]:
    """Every byte a token, then two special ones."""
    special = ["<s>", "</s>"]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 256 + i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, text in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(byte_alphabet())}, "merges": []},
    }


def write_model(folder: Path, *, seed: int = 0, tokenizer: bool = True) -> Path:
    """A two-layer Llama as safetensors in bfloat16, as Hugging Face writes it."""
    width, kv, ffn = 64, 32, 96
    shapes = {"model.embed_tokens.weight": (300, width), "model.norm.weight": (width,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.input_layernorm.weight": (width,), f"{layer}.post_attention_layernorm.weight": (width,)}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (kv if n in "kv" else width, width) for n in "qkvo"}
        shapes |= {f"{layer}.mlp.{n}_proj.weight": (ffn, width) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, ffn)
    rng = np.random.default_rng(seed)
    tensors = {n: np.ones(s) if len(s) == 1 else rng.standard_normal(s) / 8 for n, s in shapes.items()}
    return _write(folder, CONFIG, tensors, tokenizer)


def write_mpt(folder: Path, form: str) -> Path:
    """A two-layer MPT of a form, likewise; its norms and biases are no ones and zeros."""
    config = MPT[form]
    width, vocab = config["d_model"], config["vocab_size"]
    ffn = config.get("ffn_config", {}).get("ffn_hidden_size", 4 * width)
    qkv = width + 2 * config["attn_config"].get("kv_n_heads", config["n_heads"]) * width // config["n_heads"]
    shapes = {"transformer.wte.weight": (vocab, width), "transformer.norm_f.weight": (width,)}
    if form == "learned":
        shapes["transformer.wpe.weight"] = (config["max_seq_len"], width)
    for i in range(config["n_layers"]):
        block = f"transformer.blocks.{i}"
        shapes |= {f"{block}.norm_1.weight": (width,), f"{block}.norm_2.weight": (width,)}
        shapes |= {f"{block}.attn.Wqkv.weight": (qkv, width), f"{block}.attn.out_proj.weight": (width, width)}
        shapes |= {
            f"{block}.ffn.up_proj.weight": (ffn, width),
            f"{block}.ffn.down_proj.weight": (width, ffn),
        }
        shapes |= {f"{block}.ffn.gate.weight": (ffn, width)} if form == "rope" else {}
    if not config["no_bias"]:
        bare = ("wte", "wpe", "norm") if form == "rope" else ("wte", "wpe")
        plain = [name for name in shapes if not any(part in name for part in bare)]
        shapes |= {name.replace(".weight", ".bias"): shapes[name][:1] for name in plain}
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(s) / 8 + (".norm" in n and n.endswith("weight")) for n, s in shapes.items()}
    return _write(folder, config, tensors, tokenizer=True)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], tokenizer: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, values in tensors.items():
        raw = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    packed = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(packed).to_bytes(8, "little") + packed + data)
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{{ '<s>assistant: ' }}"
