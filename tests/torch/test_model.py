"""Models of transformers, taken from memory, against transformers itself."""

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are transformers'")

import torch_models as models  # noqa: E402

from roofline.common.errors import CapacityError, ConfigError, RequestError, UnsupportedError  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.torch import TorchModel, from_model  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402

PLAIN = {"backend": "reference", "arithmetic": "plain"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def theirs(model, input_ids):
    """transformers' (logits, last hidden states), in float32."""
    with torch.no_grad():
        out = model(input_ids, output_hidden_states=True)
    return out.logits.float(), out.hidden_states[-1].float()


@pytest.fixture(scope="module")
def llama() -> Iterator[TorchModel]:
    with from_model(models.build("llama"), models.tokenizer(), threads=1) as model:
        yield model


@pytest.mark.parametrize("name", models.CASES)
def test_plain_reference_equals_transformers_in_float32(name):
    model, input_ids = models.build(name), models.ids(2, 40)
    logits, hidden = theirs(model, input_ids)
    with from_model(model, **PLAIN) as ours:
        assert (ours.logits(input_ids) - logits).abs().max() < 1e-4
        assert (ours.hidden_states(input_ids) - hidden).abs().max() < 1e-4
    assert logits.std() > 0.5


@pytest.mark.parametrize("name", models.CASES)
def test_cpu_differs_from_transformers_by_the_rounding_of_its_cache(name):
    """Weights are float32 here; q, k, v and the softmax weights are bfloat16 on the cpu (2^-9 relative)."""
    model, input_ids = models.build(name), models.ids(2, 150)  # more than one chunk
    logits, hidden = theirs(model, input_ids)
    with from_model(model, threads=1) as ours:
        assert (ours.logits(input_ids) - logits).abs().max() < 0.05 * logits.std()
        assert (ours.hidden_states(input_ids) - hidden).abs().max() < 0.05 * hidden.std()


@pytest.mark.parametrize(("dtype", "format"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_16_bit_weights_are_the_models_own(dtype, format):
    """Ours computes in float32 on the rounded weights, as transformers does on the same weights widened."""
    model, input_ids = models.build("llama", dtype), models.ids(33)
    ours = from_model(model, **PLAIN)
    assert {info.format for info in checkpoint_of(model).tensors.values()} == {format}
    wide = models.build("llama")  # model.float() would keep rotary frequencies that model.to(dtype) had rounded
    wide.load_state_dict(model.state_dict())
    logits, _ = theirs(wide, input_ids[None])
    assert (ours.logits(input_ids) - logits[0]).abs().max() < 1e-4
    ours.close()


def test_tensors_are_read_where_they_are():
    model = models.build("llama3_tied", torch.bfloat16)
    checkpoint = checkpoint_of(model)
    assert "head.weight" not in checkpoint.tensors
    held = model.model.layers[1].mlp.up_proj.weight.detach()
    assert checkpoint.read("layers.1.mlp.up.weight").ctypes.data == held.data_ptr()
    assert np.array_equal(checkpoint.dequantize("layers.1.mlp.up.weight"), held.float().numpy())


def test_transposed_storage_is_read_by_value():
    model = models.build("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert np.array_equal(checkpoint_of(model).dequantize("layers.0.mlp.up.weight"), weight.detach().numpy())


def test_answers_follow_the_logits(llama):
    prompts = models.ids(3, 21)
    for prompt, answer in zip(prompts, llama.generate_ids(prompts, GREEDY), strict=True):
        assert len(answer) == 6
        whole = torch.cat([prompt, answer])
        assert torch.equal(llama.logits(whole)[20:-1].argmax(1), answer)


def test_hidden_states_times_the_head_are_the_logits(llama):
    input_ids = models.ids(19)
    head = models.build("llama").lm_head.weight.detach()
    assert (llama.hidden_states(input_ids) @ head.T - llama.logits(input_ids)).abs().max() < 1e-4


def test_rows_do_not_depend_on_what_is_beside_or_was_before(llama):
    input_ids = models.ids(3, 200)
    whole = llama.logits(input_ids)
    assert torch.equal(llama.logits(input_ids[1]), whole[1])
    assert torch.equal(llama.logits(input_ids[2, :60]), whole[2, :60])
    assert torch.equal(llama.hidden_states(input_ids[2:]), llama.hidden_states(input_ids)[2:])


def test_logits_leave_the_engines_cache_alone(llama):
    prompt = models.ids(64, seed=5)
    (first,) = llama.generate_ids(prompt, GREEDY)
    llama.logits(models.ids(2, 300, seed=6))
    (again,) = llama.generate(prompt, GREEDY)
    assert again.ids == first.tolist()
    assert again.usage.cached_tokens > 0


def test_text_is_the_tokenizers(llama):
    made = models.tokenizer()
    text = "the cat and the hat, naïve </s> 12"
    assert llama.llm.tokenizer.encode(text, add_special=True, parse_special=True) == made(text).input_ids
    (output,) = llama.generate("the cat", GREEDY)
    assert output.prompt_ids == made("the cat").input_ids
    assert output.text == made.decode(output.ids)
    messages = [{"role": "user", "content": "hi"}]
    wanted = made.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert llama.llm.chat(messages, GREEDY).prompt_ids == wanted
    ids = torch.tensor(output.prompt_ids)
    for prompts in (ids, ids[None], [ids], output.prompt_ids, list(ids), ["the cat"], "the cat"):
        assert [same.ids for same in llama.generate(prompts, GREEDY)] == [output.ids]


def test_without_a_tokenizer_ids_still_flow_and_end_at_the_models_end():
    prompts, params = models.ids(2, 9), SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=8)
    with from_model(models.build("qwen2"), **PLAIN) as plain:
        answers = plain.generate_ids(prompts, params)
        assert [len(answer) for answer in answers] == [8] * 4
        with pytest.raises(ConfigError, match="tokenizer"):
            plain.generate("text")
        with pytest.raises(RequestError, match="vocabulary"):
            plain.generate_ids(torch.tensor([[3], [300]]))
        assert not plain.engine.has_work
    model = models.build("qwen2")
    model.generation_config.eos_token_id = [int(answers[0][2]), 299]
    with from_model(model, **PLAIN) as ended:
        assert torch.equal(ended.generate_ids(prompts, params)[0], answers[0][:3])


@pytest.mark.parametrize(
    ("input_ids", "error"),
    [
        (torch.zeros(0, dtype=torch.int64), RequestError),
        (torch.zeros(1, 1, 1, dtype=torch.int64), RequestError),
        (torch.tensor([1.0]), RequestError),
        (torch.tensor([True]), RequestError),
        (torch.tensor([5, -1]), RequestError),
        (torch.tensor([300]), RequestError),
        (torch.zeros(513, dtype=torch.int32), CapacityError),
    ],
    ids=lambda value: f"{tuple(value.shape)}_{value.dtype}" if isinstance(value, torch.Tensor) else "",
)
def test_ids_that_cannot_be_computed_are_refused(llama, input_ids, error):
    for function in (llama.logits, llama.hidden_states):
        with pytest.raises(error):
            function(input_ids)


def test_ids_may_be_of_any_integer_type(llama):
    input_ids = models.ids(7)
    assert torch.equal(llama.logits(input_ids.to(torch.int32)), llama.logits(input_ids))


def refused(model, error, match, **options):
    with pytest.raises(error, match=match):
        from_model(model, **options)


def test_what_cannot_be_taken_is_refused_by_name():
    import transformers

    refused(models.build("llama", torch.float64), UnsupportedError, r"embed_tokens.*float64")
    refused(models.build("llama").model, ConfigError, r"head\.weight.*is missing")
    with torch.device("meta"):
        empty = models.CASES["llama"][1]
        refused(transformers.LlamaForCausalLM(transformers.LlamaConfig(**empty)), ConfigError, "meta device")
    bloom = transformers.BloomConfig(n_layer=1, hidden_size=8, n_head=2)
    refused(transformers.BloomForCausalLM(bloom), UnsupportedError, "bloom")
    model = models.build("qwen3_tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    refused(model, ConfigError, "tie_word_embeddings")
    model = models.build("llama")
    model.config.hidden_act = "gelu"
    refused(model, UnsupportedError, "hidden_act")
    model.config.hidden_act, model.config.intermediate_size = "silu", 97
    refused(model, ConfigError, "shape")
    model = models.build("llama")
    refused(model, ConfigError, "its own", weights="random:1")
    refused(model, ConfigError, "second model", speculate="draft")
    refused(model, UnsupportedError, "arithmetic", arithmetic="plain")
    refused(model, UnsupportedError, "float32", kv_cache_dtype="int8", **PLAIN)
    refused(model, UnsupportedError, "backend", backend="abacus")
    refused(model, UnsupportedError, "tokenizer.json", tokenizer=object())


def test_a_parameter_of_another_kind_is_refused():
    class Sharded(torch.Tensor):
        pass

    model = models.build("llama")
    held = model.state_dict()
    held["model.norm.weight"] = held["model.norm.weight"].as_subclass(Sharded)
    model.state_dict = lambda: held
    refused(model, UnsupportedError, "Sharded")


@pytest.mark.parametrize("name", ["llama3_tied", "qwen3_tied", "mpt"])
@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
def test_cpu_and_reference_give_the_same_bits(name, kv_cache_dtype):
    model, input_ids = models.build(name, torch.bfloat16), models.ids(37)
    options = {"kv_cache_dtype": kv_cache_dtype, "threads": 1}
    with from_model(model, **options) as ours, from_model(model, backend="reference", **options) as slow:
        assert torch.equal(ours.logits(input_ids), slow.logits(input_ids))
        assert torch.equal(ours.hidden_states(input_ids), slow.hidden_states(input_ids))
