"""Figures of a model from its Program, and of its tensors in other formats."""

import pytest

from roofline.common.errors import ConfigError
from roofline.hardware.chips.products import SheetRoofs
from roofline.models.presets import preset
from roofline.models.registry import configure
from roofline.program.compile import compile_program
from roofline.program.rates import ProgramSpeeds
from roofline.program.restate import Restated, format_named, nbytes, restate
from roofline.program.summary import Stored, stored_formats, summarize
from roofline.program.target import gpu
from roofline.program.trace import trace
from roofline.weights.names import parameter_shapes


def tensors_of(name: str) -> dict[str, Restated]:
    return {tensor: Restated("BF16", shape) for tensor, shape in parameter_shapes(preset(name)).items()}


@pytest.mark.parametrize(
    ("name", "gibibytes", "bits"),
    [  # as llama.cpp prints them for its own files, "model size" and "BPW"
        ("llama-2-7b", 3.80, 4.84),
        ("llama-2-70b", 38.58, 4.80),
        ("llama-3-8b", 4.58, 4.89),
        ("mistral-7b-v0.1", 4.07, 4.83),
        ("qwen3-30b-a3b", 17.28, 4.86),
    ],
)
def test_a_mixture_takes_what_files_of_it_take(name: str, gibibytes: float, bits: float) -> None:
    tensors = tensors_of(name)
    size = nbytes(restate(tensors, "Q4_K_M"))
    summary = summarize(trace(*configure(preset(name)), tensors), tensors)
    assert round(size / 2**30, 2) == gibibytes
    assert round(8 * size / summary.parameters, 2) == bits


def test_vectors_keep_float32_beside_blocks() -> None:
    restated = restate(tensors_of("llama-3.2-1b"), "Q4_0")
    assert restated["layers.3.mlp.up.weight"].format == "Q4_0"
    assert restated["final_norm.weight"].format == "F32"
    assert restate(tensors_of("llama-3.2-1b"), "F16")["final_norm.weight"].format == "F16"
    with pytest.raises(ConfigError, match="multiples of 256"):
        restate(tensors_of("smollm2-135m"), "Q6_K")


@pytest.mark.parametrize(("name", "form"), [("bf16", "BF16"), ("FP8", "E4M3"), ("q4_k_m", "Q4_K_M"), ("q8", "Q8_0")])
def test_formats_go_by_several_names(name: str, form: str) -> None:
    assert format_named(name) == form


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'Q4_0'"):
        format_named("Q4_00")


def test_parameters_and_operations_of_a_token() -> None:
    tensors = tensors_of("llama-3.2-1b")
    summary = summarize(trace(*configure(preset("llama-3.2-1b")), tensors), tensors)
    assert (summary.layers, summary.parameters, summary.active) == (16, 1_235_814_400, 1_235_814_400)
    assert (summary.embedding, summary.tied, summary.experts) == (128256 * 2048, True, 0)
    matrices = sum(info.shape[0] * info.shape[1] for info in tensors.values() if len(info.shape) == 2)
    assert summary.token_flops == pytest.approx(2 * matrices, rel=1e-3)  # norms and the like beside it
    assert summary.token_flops > 2 * matrices
    assert summary.pair_flops == 16 * 4 * 32 * 64
    assert summary.bytes == 2 * summary.parameters


@pytest.mark.parametrize(("name", "tied"), [("llama-3.2-1b", True), ("llama-2-7b", False), ("mistral-7b-v0.1", False)])
def test_embeddings_are_tied_where_the_logits_are_products_with_them(name: str, tied: bool) -> None:
    tensors = tensors_of(name)
    assert summarize(trace(*configure(preset(name)), tensors), tensors).tied is tied


def test_tensors_are_counted_by_format() -> None:
    tensors = {"a": Restated("BF16", (2, 4)), "b": Restated("Q8_0", (2, 32)), "c": Restated("BF16", (3,))}
    assert stored_formats(tensors) == (Stored("Q8_0", 1, 64, 68), Stored("BF16", 2, 11, 22))


def test_rates_are_work_divided_by_roofs() -> None:
    tensors = tensors_of("llama-2-7b")
    program = compile_program(*configure(preset("llama-2-7b")), tensors, gpu())
    speeds = ProgramSpeeds(program, SheetRoofs(181e12, 1638.4e9, ("a data sheet",)))
    one = speeds.decode(1, 1)
    assert one.seconds == pytest.approx(8.07e-3, rel=1e-3)  # every weight but the embedding once: the known figure
    assert one.tokens_per_s == pytest.approx(1 / one.seconds)
    assert one.bound == "memory"
    many = speeds.decode(8, 2048)
    assert many.kv_bytes == 8 * (2048 + 1) * 2 * 2 * 32 * 4096  # what is read, and one token written
    assert many.tokens_per_s == pytest.approx(8 / many.seconds)
    prompt = speeds.prefill(2048)
    assert (prompt.bound, prompt.tokens) == ("compute", 2048)
    least = prompt.flops / 181e12
    assert least < prompt.seconds < 1.1 * least


@pytest.mark.parametrize(("context", "keys"), [(1024, 1024), (8192, 4096)])
def test_a_window_bounds_what_a_token_reads(context: int, keys: int) -> None:
    tensors = tensors_of("mistral-7b-v0.1")
    program = compile_program(*configure(preset("mistral-7b-v0.1")), tensors, gpu())
    rate = ProgramSpeeds(program, SheetRoofs(181e12, 1638.4e9, ())).decode(2, context)
    assert rate.kv_bytes == 2 * (keys + 1) * 2 * 2 * 32 * 8 * 128


def test_of_experts_a_token_meets_those_that_it_is_routed_to() -> None:
    tensors = tensors_of("mixtral-8x7b")
    summary = summarize(trace(*configure(preset("mixtral-8x7b")), tensors), tensors)
    assert (summary.parameters, summary.active) == (46_702_792_704, 12_879_925_248)
    assert (summary.experts, summary.top) == (8, 2)
    assert nbytes(restate(tensors, "Q4_K_M")) / 1e9 == pytest.approx(28.45, abs=0.005)  # as files of it are listed
    program = compile_program(*configure(preset("mixtral-8x7b")), tensors, gpu())
    speeds = ProgramSpeeds(program, SheetRoofs(1307.4e12, 5.3e12, ()))
    embedding = 2 * 32000 * 4096
    one, many = speeds.decode(1, 1), speeds.decode(256, 1)
    assert one.weight_bytes == pytest.approx(2 * summary.active - embedding, rel=1e-3)
    assert many.weight_bytes == pytest.approx(2 * summary.parameters - embedding, rel=1e-3)
