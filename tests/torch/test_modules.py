"""Modules of models from memory: what computes otherwise than transformers' own of the configuration is refused."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

import torch_models as models  # noqa: E402

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def layer(model):
    return model.model.layers[1]


def replace_up(model):
    up = layer(model).mlp.up_proj
    layer(model).mlp.up_proj = Doubled(up.in_features, up.out_features, bias=False)
    layer(model).mlp.up_proj.weight = up.weight


def other_theta(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}


def own_class(model):
    class Scaled(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2
            return out

    model.__class__ = Scaled


LAYER = r"'model\.layers\.1\."
CHANGED = {
    "eps": (
        lambda model: setattr(layer(model).input_layernorm, "variance_epsilon", 0.5),
        LAYER + r"input_layernorm' has variance_epsilon 0\.5, and its configuration gives 1e-06",
    ),
    "class": (replace_up, LAYER + "mlp.up_proj' computes otherwise than the Linear"),
    "forward": (
        lambda model: setattr(layer(model).mlp, "forward", lambda x: x * 0),
        LAYER + "mlp' has a forward of its own",
    ),
    "scaling": (
        lambda model: setattr(layer(model).self_attn, "scaling", 1.0),
        LAYER + r"self_attn' has scaling 1, and its configuration gives 0\.",
    ),
    "activation": (
        lambda model: setattr(layer(model).mlp, "act_fn", torch.nn.GELU()),
        r"act_fn' computes otherwise than the SiLU",
    ),
    "theta": (other_theta, "rotary_emb' holds another inv_freq"),
    "frequencies": (lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), "rotary_emb' holds another inv_freq"),
    "model_forward": (own_class, "the model computes otherwise than the LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_module_that_computes_otherwise_is_refused_by_name(name):
    change, match = CHANGED[name]
    model, input_ids = models.build("llama"), models.ids(1, 9)
    with torch.no_grad():
        before = model(input_ids).logits
        change(model)
        if name != "theta":  # which transformers has read already: what it says is another model than it is
            assert (model(input_ids).logits - before).abs().max() > 1e-3
    with pytest.raises(ConfigError, match=match):
        checkpoint_of(model)


def test_attention_that_was_registered_by_name_is_refused(monkeypatch):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]

    def sharper(module, query, *args, **kwargs):
        return sdpa(module, 3 * query, *args, **kwargs)

    monkeypatch.setitem(functions, "sharper", sharper)
    model = models.build("llama")
    model.set_attn_implementation("sharper")
    with pytest.raises(ConfigError, match=r"attention is computed by .*sharper, .*set_attn_implementation\(\"sdpa\"\)"):
        checkpoint_of(model)
    model.set_attn_implementation("sdpa")
    assert checkpoint_of(model).tensors


def own_name(model):
    class Mine(type(model)):
        """Another name, and nothing else."""

    model.__class__ = Mine


def laid_around(model):
    """As accelerate leaves a model after training in bf16, and one that it spreads over devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    operations = pytest.importorskip("accelerate.utils.operations")
    hooks.add_hook_to_module(layer(model).mlp, hooks.AlignDevicesHook())
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=False)
    model.forward = operations.convert_outputs_to_fp32(autocast(model.forward.__func__)).__get__(model)


SAME = {
    "rounded_frequencies": lambda model: model.bfloat16().float(),
    "training": lambda model: model.train().gradient_checkpointing_enable(),
    "padding": lambda model: setattr(model.config, "pad_token_id", 3),
    "longer": lambda model: setattr(model.config, "max_position_embeddings", 4096),
    "class_without_methods": own_name,
    "accelerate": laid_around,
    "layers_in_another_order": lambda model: model.model.layers.insert(0, model.model.layers.pop(1)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_that_is_computed_is_taken(name):
    model = models.build("llama")
    SAME[name](model)
    state = torch.random.get_rng_state()
    assert len(checkpoint_of(model).tensors) > 10
    assert torch.equal(torch.random.get_rng_state(), state)
