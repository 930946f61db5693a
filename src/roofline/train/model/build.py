"""Builds the model of a configuration's model section: its shape, its initial parameters, its compilation."""

from functools import partial
from pathlib import Path

import torch

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.models import presets
from roofline.models.registry import configure
from roofline.train.config.schema import ModelSection, TrainConfig
from roofline.train.model.init import fill, initialize
from roofline.train.model.modules import Model
from roofline.train.model.tensor_parallel import part
from roofline.weights.checkpoint import Checkpoint, open_checkpoint, read_config
from roofline.weights.sources import resolve

_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
_MPT_ONLY = ("d_model", "n_heads", "n_layers", "vocab_size")


def model_config(section: ModelSection, length: int) -> JsonObject:
    """The canonical configuration of a model section. length: tokens of a row. Raises ConfigError, UnsupportedError."""
    if section.name == "mpt_causal_lm":
        config = _mpt(section, length)
    elif section.name == "hf_causal_lm":
        config = read_config(_files(section))
        if section.pretrained and section.config_overrides:
            raise ConfigError(
                "model.config_overrides change a shape that pretrained weights have: set pretrained=false"
            )
    else:
        config = presets.preset(section.name)
    mpt_keys = [name for name in _MPT_ONLY if getattr(section, name) is not None]
    if section.name != "mpt_causal_lm" and mpt_keys:
        raise ConfigError(f"model.{mpt_keys[0]} belongs to mpt_causal_lm: use config_overrides for {section.name}")
    config = config | section.config_overrides
    if "width" in section.config_overrides or "heads" in section.config_overrides:
        config = config | _derived(config, section.config_overrides)
    configure(config)
    if config["max_position"] < length:
        raise ConfigError(f"max_seq_len={length}: the model has {config['max_position']} positions")
    return config


def start(model: Model, config: TrainConfig) -> None:
    """Fill the parameters from a model's files, or as init_config says."""
    section = config.model
    if section.name == "hf_causal_lm" and section.pretrained:
        load(model, open_checkpoint(_files(section)))
        return
    name = "kaiming_normal_" if section.name == "mpt_causal_lm" else "baseline_"
    init = section.init_config
    initialize(model, config.seed, init if init.name else init.model_copy(update={"name": name}))


def wrap(model: Model, config: TrainConfig) -> None:
    """Activation checkpointing, then compilation around it, as configured."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    checkpointing = config.fsdp_config.activation_checkpointing if config.fsdp_config is not None else False
    if checkpointing:
        kept_ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *_ATTENTION]
        selective = partial(create_selective_checkpoint_contexts, kept_ops)
        model.checkpoint_activations(selective if checkpointing == "selective" else None)
    if config.compile_config is not None:
        model.compile(config.compile_config.backend, config.compile_config.mode)


def load(model: Model, checkpoint: Checkpoint) -> None:
    """Copy the weights of a file into the parameters; quantised formats are widened."""
    for _, param, tensor in model.canonical():
        fill(tensor, part(param, model.ranks).cut(torch.from_numpy(checkpoint.dequantize(param.name))))


def _files(section: ModelSection) -> Path:
    if section.pretrained_model_name_or_path is None:
        raise ConfigError("model.pretrained_model_name_or_path is missing: the folder or name of a model")
    return resolve(section.pretrained_model_name_or_path)


def _mpt(section: ModelSection, length: int) -> JsonObject:
    missing = [name for name in _MPT_ONLY if getattr(section, name) is None]
    if missing:
        raise ConfigError(f"model.{missing[0]} is missing")
    width, heads = int(section.d_model or 0), int(section.n_heads or 0)
    if width < 1 or heads < 1 or width % heads:
        raise ConfigError(f"model.n_heads: {heads} heads do not divide a width of {width}")
    alibi = section.attn_config.alibi
    if not alibi and not section.learned_pos_emb:
        raise ConfigError("model: an MPT needs attn_config.alibi or learned_pos_emb")
    ffn = section.expansion_ratio * width
    if ffn != int(ffn):
        raise ConfigError(f"model.expansion_ratio: {section.expansion_ratio} times {width} is not a whole number")
    return presets.preset("mpt-125m") | {
        "width": width,
        "layers": section.n_layers,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "ffn": int(ffn),
        "vocab": section.vocab_size,
        "max_position": section.max_seq_len or length,
        "tied": section.tie_word_embeddings,
        "positions": "alibi" if alibi else "learned",
        "bias": not section.no_bias,
    }


def _derived(config: JsonMapping, overrides: JsonMapping) -> JsonObject:
    """head_dim, and for MPT kv_heads, as they follow from an overridden width or number of heads."""
    derived = {} if "head_dim" in overrides else {"head_dim": config["width"] // config["heads"]}
    if "kv_heads" not in overrides and config["family"] == "mpt":
        derived["kv_heads"] = config["heads"]
    return derived
