"""Keys of a config.json that nothing reads: named for whoever asks what a model takes, for they may change it."""

import re
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path

from roofline.weights.config.hf import from_hf
from roofline.weights.config.unfamiliar import COMMON
from roofline.weights.config.wrapped import text_fields
from roofline.weights.families.shared.hf_fields import NEUTRAL, SHARED

# Of training, of a head that is not there, of how other programs compute the same, and sums of other keys: no size and
# no byte follows.
_ASIDE = re.compile(
    r"init_\w+|\w*(_init|_std|_scale_init)|\w*dropout\w*|layerdrop|summary_\w+|classifier\w*|embedding_fraction|"
    r"id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|prefix|tokenizer_class|"
    r"chunk_size_feed_forward|gradient_checkpointing|\w*(aux|z)_loss\w*|\w*router_jitter\w*|seq_aux|ep_size|is_decoder|"
    r"attn_implementation|_attn_\w+|_flash_attn_\w+|use_flash_attn\w*|reorder_and_upcast_attn|return_dict\w*|"
    r"torchscript|use_bfloat16|base_model_\w+|name|verbose|unsloth_\w+|_commit_hash|transformers\.js_config|"
    r"qk_head_dim|chunk_size|mamba_chunk_size|residual_in_fp32|fused_add_norm|rescale_prenorm_residual|use_mambapy|"
    r"use_associative_scan|use_falcon_mambapy|use_mamba_kernels|(mamba_)?time_step_(min|max|floor|scale|init_scheme)|"
    r"num_logits_to_keep|mamba_ssm_cache_dtype|moe_shared_expert_overlap|pad_vocab_size_multiple|\w+_initializer_range"
)


class _NotedKeys(Mapping[str, object]):
    """A table that notes which of its keys are looked up by name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values, self.read = values, set[str]()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, object]:
        """All of the table, which reads no key by name."""
        return self._values.items()


def unread_keys(path: Path, config: Mapping[str, object]) -> list[str]:
    """The keys of a parsed config.json of a known model type that have a value and that nothing reads, without those of
    training and housekeeping; of a model that reads more than text those of its text part. Raises ConfigError,
    UnsupportedError as `from_hf`."""
    config = text_fields(path, config).values
    noted = _NotedKeys(config)
    from_hf(path, noted)
    known = {*noted.read, *NEUTRAL, *SHARED}
    return [
        key
        for key, value in config.items()
        if value is not None and key not in known and not COMMON.fullmatch(key) and not _ASIDE.fullmatch(key)
    ]
