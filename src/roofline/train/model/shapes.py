"""The canonical configuration of a configuration's model section; without torch."""

from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.fields import Fields
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.models import presets
from roofline.models.registry import configure
from roofline.train.config.schema import AttnSection, ModelSection
from roofline.weights.checkpoint import open_checkpoint, read_config
from roofline.weights.families.mpt import from_hf as from_mpt
from roofline.weights.latent_form import latent_config
from roofline.weights.sources import resolve

_MPT_ONLY = ("d_model", "n_heads", "n_layers", "vocab_size")
_MPT_KEYS = {*_MPT_ONLY, "expansion_ratio", "max_seq_len", "no_bias", "learned_pos_emb", "tie_word_embeddings"}
_MPT_KEYS |= {"norm_type", "attn_config", "ffn_config"}
_OF_RUNS = ("attn_impl", "attn_uses_sequence_id")  # keys of attn_config that are no part of the model
_OF_ROPE = ("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config")


def model_config(section: ModelSection, length: int) -> JsonObject:
    """The canonical configuration of a model section. length: tokens of a row. Raises ConfigError, UnsupportedError."""
    if section.name == "mpt_causal_lm":
        config = _mpt(section, length)
    elif section.name == "hf_causal_lm":
        # Of weights that are read, they may say that the head is not the embedding.
        opened = dict(open_checkpoint(files(section)).config) if section.pretrained else read_config(files(section))
        config = dict(latent_config(opened, latent=False))
        if section.pretrained and section.config_overrides:
            raise ConfigError(
                "model.config_overrides change a shape that pretrained weights have: set pretrained=false"
            )
    else:
        config = presets.preset(section.name)
    mpt_keys = _changed(section)
    if section.name != "mpt_causal_lm" and mpt_keys:
        raise ConfigError(f"model.{mpt_keys[0]} belongs to mpt_causal_lm: use config_overrides for {section.name}")
    equal_heads, config = config["kv_heads"] == config["heads"], config | section.config_overrides
    if "width" in section.config_overrides or "heads" in section.config_overrides:
        config = config | _derived(config, section.config_overrides, equal_heads)
    configure(config)
    if config["max_position"] < length:
        raise ConfigError(f"max_seq_len={length}: the model has {config['max_position']} positions")
    return config


def files(section: ModelSection) -> Path:
    """The file or folder of hf_causal_lm. Raises ConfigError."""
    if section.pretrained_model_name_or_path is None:
        raise ConfigError("model.pretrained_model_name_or_path is missing: the folder or name of a model")
    return resolve(section.pretrained_model_name_or_path)


def _mpt(section: ModelSection, length: int) -> JsonObject:
    default = AttnSection()
    unread = [name for name in _OF_ROPE if getattr(section.attn_config, name) != getattr(default, name)]
    if unread and not section.attn_config.rope:
        raise ConfigError(f"model.attn_config.{unread[0]} is read with rope: true alone")
    values = section.model_dump(include=_MPT_KEYS, exclude_none=True)
    del values["attn_config"]["attn_uses_sequence_id"]  # of the data, not of the model
    return from_mpt(Fields("model", {"max_seq_len": length} | values))


def _changed(section: ModelSection) -> list[str]:
    """The keys of mpt_causal_lm's shape that differ from their defaults."""
    default = ModelSection(name=section.name)
    own = {
        "attn_config": default.attn_config.model_copy(
            update={name: getattr(section.attn_config, name) for name in _OF_RUNS}
        )
    }
    keys = sorted(_MPT_KEYS, key=list(ModelSection.model_fields).index)
    return [name for name in keys if getattr(section, name) != own.get(name, getattr(default, name))]


def _derived(config: JsonMapping, overrides: JsonMapping, equal_heads: bool) -> JsonObject:
    """head_dim, and for MPT without grouped queries kv_heads, as they follow from an overridden width or heads."""
    derived = {} if "head_dim" in overrides else {"head_dim": config["width"] // config["heads"]}
    if "kv_heads" not in overrides and config["family"] == "mpt" and equal_heads:
        derived["kv_heads"] = config["heads"]
    return derived
