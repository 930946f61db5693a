"""What readers of files with experts share."""

from roofline.common.fields import Fields, describe
from roofline.weights.families.shared.canonical import Config

MOST_EXPERTS, MOST_CHOSEN = 4096, 256
# Of all experts of a layer together, one below the other: GGUF's, and what a module for training calls them.
EXPERTS = {
    "mlp.experts.gate": ("ffn_gate_exps", "mlp.experts.gate_proj"),
    "mlp.experts.up": ("ffn_up_exps", "mlp.experts.up_proj"),
    "mlp.experts.down": ("ffn_down_exps", "mlp.experts.down_proj"),
}
# Of each expert, as most Hugging Face files have them. GGUF has no such tensors.
EACH_EXPERT = {
    f"mlp.experts.{{expert}}.{name}": ("", f"mlp.experts.{{expert}}.{name}_proj") for name in ("gate", "up", "down")
}
# Of Qwen's models: the router, and the expert that every token goes to, which a sigmoid scales.
ROUTED_BESIDE_SHARED = {
    "mlp.router": ("ffn_gate_inp", "mlp.gate"),
    "mlp.shared.gate": ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    "mlp.shared.up": ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    "mlp.shared.down": ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    "mlp.shared.scale": ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
}
# Modules by the last part of their names that PEFT (0.21.2) takes for matrices of experts, wherever they stand, in the
# classes whose experts transformers 4 had as modules, each with these.
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
HONOURED_GGUF = ("expert_count", "expert_used_count")


def hf_experts(fields: Fields, name: str, chosen: str = "num_experts_per_tok") -> Config:
    """How many experts there are and how many a token goes to, of a config.json that calls the first `name`."""
    return _experts(fields, name, chosen)


def gguf_experts(fields: Fields) -> Config:
    """The same of GGUF metadata."""
    return _experts(fields, "expert_count", "expert_used_count")


def experts_to_gguf(config: Config) -> Config:
    """The inverse of `gguf_experts`: the keys of GGUF metadata."""
    return {"expert_count": config["experts"], "expert_used_count": config["experts_per_token"]}


def expert_size(fields: Fields, name: str) -> int:
    """The inner width of an expert. Raises ConfigError where it is missing or not within reason."""
    value = fields.need(name, int)
    if not 1 <= value <= 1 << 22:
        fields.refuse(name, f"{describe(value)} is not from 1 to {1 << 22}")
    return value


def _experts(fields: Fields, count: str, chosen: str) -> Config:
    experts = fields.need(count, int)
    if not 1 <= experts <= MOST_EXPERTS:
        fields.refuse(count, f"{describe(experts)} is not from 1 to {MOST_EXPERTS}")
    top = fields.need(chosen, int)
    if not 1 <= top <= min(experts, MOST_CHOSEN):
        fields.refuse(chosen, f"{describe(top)} is not from 1 to {min(experts, MOST_CHOSEN)}")
    return {"experts": experts, "experts_per_token": top}
