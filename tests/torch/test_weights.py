"""Weights of models from memory: those of the moment, of every family, and none of a model that is no plain one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are transformers'")

import torch_models as models  # noqa: E402

from roofline.common.errors import ConfigError, RequestError, UnsupportedError  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.torch import from_model, quantize_linears  # noqa: E402
from roofline.weights.families.table import MODEL_TYPES  # noqa: E402
from tests.adapter_files import matrices, shapes, write_adapter  # noqa: E402
from tests.models import parity_cases, wrapped_models  # noqa: E402

PLAIN = {"backend": "reference", "arithmetic": "plain"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def trained(model) -> None:
    """A step of training in place, as optimizers take it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{"threads": 1}, PLAIN, {"backend": "reference"}], ids=str)
def test_the_weights_are_those_of_the_moment_whatever_becomes_of_the_model(options):
    model, input_ids = models.build("llama3_tied"), models.ids(9)
    with from_model(model, **options) as first, from_model(model, **options) as second:
        logits, hidden = first.logits(input_ids), first.hidden_states(input_ids)
        answers = first.generate_ids(input_ids, GREEDY)
        trained(model)
        for ours in (first, second):  # the second has computed nothing before
            assert torch.equal(ours.generate_ids(input_ids, GREEDY)[0], answers[0])
            assert torch.equal(ours.hidden_states(input_ids), hidden)
            assert torch.equal(ours.logits(input_ids), logits)
    with from_model(model, **options) as again:
        assert not torch.allclose(again.logits(input_ids), logits, atol=0.1)


def test_lengths_of_rows_for_adapters_are_those_of_the_moment(tmp_path):
    """DoRA's sums read the model's own weights when an adapter is loaded."""
    config = models.BASE
    tensors = matrices(config, 5)
    for name, (outputs, _) in shapes(config).items():
        tensors[f"base_model.model.{name}.lora_magnitude_vector"] = np.full(outputs, 0.5, np.float32)
    folder = write_adapter(tmp_path / "adapter", tensors, use_dora=True)
    model, options = models.build("llama"), {"threads": 1, "max_adapters": 1, "max_adapter_rank": 4}
    prompt, told = models.ids(9).tolist(), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)

    def logprobs(ours):
        (output,) = ours.llm.generate(prompt, told, adapter=ours.llm.load_adapter(folder))
        return output.logprobs

    with (
        from_model(model, models.tokenizer(), **options) as first,
        from_model(model, models.tokenizer(), **options) as second,
    ):
        before = logprobs(first)
        trained(model)
        assert logprobs(second) == before


MIXTURE = parity_cases.BASE | {"experts": 6, "experts_per_token": 2, "tied": False}
QWEN_MOE = MIXTURE | {"family": "qwen_moe", "renormalise": False}
OTHERS = {
    "mpt": parity_cases.PLAIN | {"family": "mpt", "positions": "alibi", "bias": False, "ffn": 256},
    "mixtral": MIXTURE | {"family": "mixtral"},
    "qwen2_moe": QWEN_MOE | {"attention_bias": True, "shared_ffn": 80},
    "qwen3_moe": QWEN_MOE | {"qk_norm": True},
    "minicpm3": parity_cases.CASES["minicpm3"].config,  # not with two sets of frequencies, of which texts take one
}
CASES = {case.kind: case.config for case in (*parity_cases.CASES.values(), *parity_cases.ENCODERS.values())} | OTHERS


APART = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "gpt_oss", "gpt2", "gpt_neox", "mpt")  # stored otherwise


IN_WRAPPERS = ("qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text", "gemma4_unified_text")
# Types that transformers has no causal model of, or that are read and written as one of another type.
OF_ANOTHER = (*IN_WRAPPERS, "kimi_k2", "solar_open", "sarvam_mla", "internlm3", "iquestcoder", "cwm", "gpt-sw3")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in APART else pytest.mark.slow)
        for kind in MODEL_TYPES
        if kind not in OF_ANOTHER
    ],
)
def test_every_family_is_taken_from_memory(kind):
    """As transformers holds it there, which may be otherwise than in files: experts stacked, weights by columns."""
    config = CASES.get(kind, CASES["roberta"])  # xlm-roberta is RoBERTa under another name
    encoder = config["family"] == "bert"
    model = parity_cases.encoder_of(config, kind) if encoder else parity_cases.theirs(config)
    assert model.config.model_type == kind
    input_ids = models.ids(2, 11, vocab=90) + 3  # RoBERTa does not count padding
    with torch.no_grad():
        out = model(input_ids)
    with from_model(model, **PLAIN) as ours:
        values, wanted = (
            (ours.hidden_states(input_ids), out.last_hidden_state) if encoder else (ours.logits(input_ids), out.logits)
        )
        if encoder:
            with pytest.raises(UnsupportedError, match="logits of an encoder"):
                ours.logits(input_ids)
        else:  # what embeddings are made of
            with torch.no_grad():
                rows = model.base_model(input_ids)[0]
            assert (ours.hidden_states(input_ids) - rows).abs().max() < 1e-4
    assert (values - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1


def greedy_of(model, ids, count):
    """The likeliest ids behind a text, each from the whole text: transformers' cache gives a small Gemma 4 others."""
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -count:].tolist()


@pytest.mark.parametrize("kind", wrapped_models.CONFIGS)
def test_the_text_part_of_a_model_that_reads_pictures_is_taken_from_memory(kind):
    model = wrapped_models.wrapped(kind)
    input_ids = models.ids(2, 11, vocab=88)
    with torch.no_grad():
        wanted = model(input_ids).logits
    with from_model(model, **PLAIN) as ours:
        assert (ours.logits(input_ids) - wanted).abs().max() < 1e-4
        greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        (answer, _) = ours.generate_ids(input_ids, greedy)
        assert answer.tolist() == greedy_of(model, input_ids[:1], 5)
        with pytest.raises(RequestError, match="id 90 is the model's image_token_i"):
            ours.generate_ids(torch.tensor([[5, 90, 7]]), greedy)
    model.model.language_model.layers[1].self_attn.scaling *= 2
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn' has scaling"):
        from_model(model, **PLAIN)


def test_what_is_changed_in_the_vision_tower_is_no_matter():
    model = wrapped_models.wrapped("gemma3")
    attention = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn"))
    assert "vision" in next(name for name, module in model.named_modules() if module is attention)
    attention.scale *= 2
    from_model(model, **PLAIN).close()


def adapted(merged):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), config)
    if merged:
        model.merge_adapter()
    return model


def compiled_layer():
    model = models.build("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def packed():
    model = models.build("llama", hidden_size=64, intermediate_size=64)
    quantize_linears(model)
    return model


WRAPPED = {
    "peft": (lambda: adapted(False), r"model\.merge_and_unload\(\)"),
    "merged": (lambda: adapted(True), r"model\.merge_and_unload\(\)"),
    "below_peft": (
        lambda: adapted(True).get_base_model(),
        r"q_proj' has an adapter .* peft_model\.merge_and_unload\(\)",
    ),
    "compiled": (lambda: torch.compile(models.build("llama")), r"torch\.compile: hand over .*\._orig_mod"),
    "compiled_layer": (compiled_layer, r"layers\.1' is wrapped by torch\.compile: hand over .*\._orig_mod"),
    "packed": (packed, r"q_proj' is a PackedLinear, .* before quantize_linears"),
    "below_the_head": (
        lambda: models.build("llama").model,
        r"LlamaModel is a model below its head; .* LlamaForCausalLM",
    ),
    "parallel": (lambda: torch.nn.DataParallel(models.build("llama")), r"DataParallel .* hand over its \.module"),
    "path": (lambda: "smollm2-135m", r"roofline\.LLM takes names and paths"),
    "no_model": (lambda: torch.nn.Linear(3, 3), "a Linear is not a model of transformers"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_no_plain_model_is_refused_with_what_to_hand_over(name):
    build, match = WRAPPED[name]
    with pytest.raises(ConfigError, match=match):
        from_model(build(), **PLAIN)


def test_what_the_refusals_advise_is_taken():
    adapter, compiled, input_ids = adapted(False), torch.compile(models.build("llama")), models.ids(9)
    for model in (adapter.merge_and_unload(), compiled._orig_mod):
        with from_model(model, **PLAIN) as ours, torch.no_grad():
            assert (ours.logits(input_ids) - model(input_ids[None]).logits[0]).abs().max() < 1e-4


def test_norms_that_differ_from_their_configuration_are_refused():
    model = models.build("llama")
    model.config.rms_norm_eps = 0.5
    with pytest.raises(ConfigError, match=r"has variance_epsilon 1e-06, and its configuration gives 0\.5"):
        from_model(model, **PLAIN)


def test_hooks_that_are_not_called_are_told(caplog):
    model = models.build("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, out: out)
    with caplog.at_level("WARNING", "roofline.torch"):
        from_model(model, **PLAIN).close()
    assert "(the first is 'model.layers.1') are not called here" in caplog.text


def test_transformers_own_hooks_are_no_reason_to_speak_and_rounded_frequencies_are(caplog):
    model = models.build("llama")
    model(torch.arange(4)[None], output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()), "transformers keeps hidden states by hooks"
    with caplog.at_level("WARNING", "roofline.torch"):
        from_model(model, **PLAIN).close()
        assert caplog.messages == []
        from_model(model.to(torch.bfloat16), **PLAIN).close()
    assert caplog.messages == [
        "LlamaForCausalLM: its rotary frequencies were rounded to torch.bfloat16, as .to() does; here they are "
        "float32, as from_pretrained(dtype=...) has them"
    ]
