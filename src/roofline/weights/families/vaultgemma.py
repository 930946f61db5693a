"""Files of VaultGemma, which has Gemma 2's fields. There are no GGUF files of it."""

from roofline.common.fields import Fields
from roofline.weights.families import gemma
from roofline.weights.families.shared.canonical import Config
from roofline.weights.families.shared.tensor_names import ATTENTION, MLP, TensorNames

NAMES = TensorNames(
    ATTENTION
    | MLP
    | {
        "attn_norm": ("attn_norm", "input_layernorm"),
        "mlp_norm": ("ffn_norm", "pre_feedforward_layernorm"),
    },
    norms_less=1.0,
)


def from_hf(fields: Fields, model_type: str) -> Config:
    """The canonical configuration."""
    return gemma.from_hf(fields, "gemma2") | {"family": "vaultgemma"}


def to_hf(config: Config) -> Config:
    """The fields of a config.json."""
    return gemma.to_hf(config) | {"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma"}
