"""The core runs no code and no step that would touch memory outside what it was given, whoever wrote them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parent))

from crafted_code import LIMITS, MODELS, PAGES, Subject, attempt, choosing, subject  # noqa: E402

from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.cpu.executable import CpuExecutable  # noqa: E402
from roofline.backends.cpu.lowered import from_bytes  # noqa: E402
from roofline.backends.sampling import SampleRows  # noqa: E402
from roofline.common.errors import CapacityError, ConfigError  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402

RECORD = [name for name, text in native.record_fields() for _ in range(4 if text.startswith("(4,)") else 1)]


@pytest.fixture(scope="module")
def llama() -> Subject:
    return subject("llama", "Q8_0", "bf16")


def spoilt(of: Subject, operation: str, field: str, value: int, at: int = 0) -> Any:
    """The model's `Lowered` with a number of the first record of that operation changed; at: of a reference's four, or
    of the numbers of the first piece."""
    lowered, _ = from_bytes(of.code, native.versions())
    numbers, start = lowered.code.copy(), 0
    while native.operations()[numbers[start]] != operation:
        start += len(RECORD) + int(numbers[start + RECORD.index("pieces")]) * len(native.piece_fields())
    place = len(RECORD) if field == "piece" else RECORD.index(field)
    numbers[start + place + at] = value
    vars(lowered)["code"] = numbers
    return lowered


@pytest.mark.parametrize(
    ("operation", "field", "at", "value", "message"),
    [
        ("norm_quantise", "operation", 0, 99, "is an operation that this build does not know"),
        ("norm_quantise", "operation", 0, native.operations().index("exchange"), "that this build does not know"),
        ("norm_quantise", "over_rows", 0, 2, "over_rows is a number that cannot be"),
        ("norm_quantise", "digits", 0, 0, "digits is a number that cannot be"),
        ("norm_quantise", "width", 0, 0, "width is a number that cannot be"),
        ("norm_quantise", "width", 0, 1 << 23, "x is a place outside the arena"),
        ("norm_quantise", "x", 2, 1 << 30, "x is a place outside the arena"),
        ("norm_quantise", "y", 1, -64, "y is a place outside the arena"),
        ("norm_quantise", "y", 0, -1, "y is no value"),
        ("norm_quantise", "x", 2, 1, "x is no multiple of 64 bytes"),
        ("norm_quantise", "weight", 0, -1, "weight is a place outside weights.bin"),
        ("norm_quantise", "weight", 0, 1 << 45, "weight is a place outside weights.bin"),
        ("embed", "over_rows", 0, 1, "over_rows is over logit rows"),
        ("take_rows", "over_rows", 0, 0, "over_rows is over tokens"),
        ("embed", "layer", 0, -(1 << 17), "layer is a number that cannot be"),
        ("rope_write", "layer", 0, 2, "layer is a layer that is not there"),
        ("rope_write", "stride", 0, 64, "stride is a number that cannot be"),
        ("rope_write", "q_norm", 0, 1 << 45, "q_norm is a place outside weights.bin"),
        (
            "rope_write",
            "operation",
            0,
            native.operations().index("attend"),
            "operation does not follow what it belongs",
        ),
        ("attend", "layer", 0, 1 << 40, "layer is a layer that is not there"),
        ("attend", "width", 0, -1, "width is a number that cannot be"),
        ("attend", "eps", 0, -(1 << 62), "eps is below 0"),
        ("rope_write", "width", 0, 1, "width is a rope table that is not there"),
        ("linear", "x", 0, 12345, "x is not the rows of integers that were made last"),
        ("linear", "digits", 0, 2, "x is "),
        ("linear", "bias", 0, 1 << 45, "bias is a place outside weights.bin"),
        ("linear", "pieces", 0, 1 << 40, "its pieces are cut off"),
        ("linear", "piece", 0, 99, "pieces have a weight format that this build does not know"),
        ("linear", "piece", 0, 0, "pieces"),
        ("linear", "piece", 1, 1 << 45, "pieces is a place outside weights.bin"),
        ("linear", "piece", 2, 0, "pieces have rows that cannot be"),
        ("linear", "piece", 3, 512, "pieces do not have the inputs of the operation"),
        ("linear", "piece", 4, 512, "pieces write outside a row of the result"),
        ("linear_gated", "piece", 2, 16, "pieces are not those of gate and up"),
    ],
)
def test_a_record_that_lies(llama: Subject, operation: str, field: str, at: int, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^operation [0-9]+.*{message}"):
        _ = spoilt(llama, operation, field, value, at).checked


@pytest.fixture(scope="module")
def mixtral() -> Subject:
    return subject("mixtral", "Q4_0", "bf16")


@pytest.mark.parametrize(
    ("operation", "field", "at", "value", "message"),
    [
        ("route", "width", 0, 1 << 13, "width is a number that cannot be"),
        ("route", "layer", 0, 9, "layer is a number that cannot be"),  # of 8 experts
        ("route", "residual", 2, 1 << 30, "residual is a place outside the arena"),
        ("route", "width", 0, 7, "residual is of another size than rows were sent to"),  # said of the experts
        ("expert_linear_gated", "residual", 0, 12345, "residual is not the experts that rows were sent to last"),
        ("expert_linear_gated", "layer", 0, 0, "layer is a number that cannot be"),
        ("expert_linear_gated", "layer", 0, 1, "pieces do not fill a row of the result"),
        ("expert_linear_gated", "stride", 0, 200, "pieces do not fill a row of the result"),
        ("expert_linear_gated", "piece", 2, 64, "pieces do not fill a row of the result"),
        ("expert_linear_gated", "piece", 1, 1 << 45, "pieces is a place outside weights.bin"),
        ("expert_linear_ranked", "layer", 0, 257, "layer is a number that cannot be"),
        ("expert_linear_ranked", "width", 0, 192, "pieces do not have the inputs of the operation"),
        ("combine", "layer", 0, 256, "x is a place outside the arena"),
        ("combine", "width", 0, 1 << 22, "x is a place outside the arena"),
    ],
)
def test_a_record_of_experts_that_lies(
    mixtral: Subject, operation: str, field: str, at: int, value: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^operation [0-9]+.*{message}"):
        _ = spoilt(mixtral, operation, field, value, at).checked


@pytest.mark.parametrize(
    ("operation", "field", "at", "value", "message"),
    [
        ("attend_sinks", "bias", 0, -1, "bias is a place outside weights.bin"),
        ("attend_sinks", "bias", 0, 1 << 45, "bias is a place outside weights.bin"),
        ("expert_bias", "weight", 0, 1 << 45, "weight is a place outside weights.bin"),
        ("expert_bias", "residual", 0, 12345, "residual is not the experts that rows were sent to last"),
        ("expert_bias", "stride", 0, 5, "residual is of another size than rows were sent to"),  # of 6 experts
        ("expert_bias", "layer", 0, 2, "residual is of another size than rows were sent to"),  # of 3 of a row
        ("expert_bias", "width", 0, 1 << 22, "x is a place outside the arena"),
        ("clamped_swiglu", "residual", 2, 1 << 30, "residual is a place outside the arena"),
    ],
)
def test_a_record_of_gpt_oss_that_lies(operation: str, field: str, at: int, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^operation [0-9]+.*{message}"):
        _ = spoilt(subject("gpt-oss", "Q4_0", "bf16"), operation, field, value, at).checked


@pytest.mark.parametrize(
    ("operation", "field", "at", "value", "message"),
    [
        ("cut_heads", "digits", 0, 1 << 20, "digits is a number that cannot be"),
        ("cut_heads", "digits", 0, -1, "digits is a number that cannot be"),
        ("cut_heads", "layer", 0, 0, "digits is a number that cannot be"),  # the first column is of no head
        ("cut_heads", "layer", 0, 7, "layer do not divide the columns"),
        ("cut_heads", "stride", 0, 1 << 21, "x is a place outside the arena"),
        ("join_heads", "layer", 0, 0, "layer is a number that cannot be"),
        ("join_heads", "stride", 0, 1 << 21, "layer leave no column for the second value"),
        ("join_heads", "residual", 2, 1 << 30, "residual is a place outside the arena"),
        ("join_heads_sharing", "stride", 0, 256, "layer leave no column for the second value"),
        ("join_heads_sharing", "layer", 0, 7, "layer do not divide the columns"),
    ],
)
def test_a_record_of_moved_columns_that_lies(operation: str, field: str, at: int, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^operation [0-9]+.*{message}"):
        _ = spoilt(subject("deepseek", "Q4_0", "bf16"), operation, field, value, at).checked


@pytest.mark.parametrize(
    ("operation", "field", "value", "message"),
    [
        ("causal_conv_silu", "stride", 1, "stride is a number that cannot be"),
        ("causal_conv_silu", "stride", 17, "stride is a number that cannot be"),
        ("causal_conv_silu", "weight", -1, "weight is a place outside weights.bin"),
        ("causal_conv_silu", "layer", -1, "layer is a number that cannot be"),
        ("causal_conv_silu", "layer", (1 << 30) + 1, "layer is a number that cannot be"),
        ("causal_conv_silu", "over_rows", 1, "over_rows is over logit rows"),
        ("delta_rule", "digits", 4, "digits is a number that cannot be"),
        ("delta_rule", "digits", 3 << 16 | 4, "digits cannot be shared out among the heads"),
        ("delta_rule", "digits", 2 << 16 | 64, "digits cannot be shared out among the heads"),
        ("delta_rule", "stride", 96, "stride are not those of q, k and v"),
        ("delta_rule", "stride", 98, "stride are not those of q, k and v"),
        ("delta_rule", "q_norm", -64, "k_norm is a place outside the arena"),
        ("delta_rule", "k_norm", 1 << 30, "k_norm is a place outside the arena"),
        ("delta_rule", "k_norm", 4, "k_norm is no multiple of 64 bytes"),
        ("norm_heads", "layer", 5, "layer do not divide the columns"),
        ("silu_apart_quantise", "residual", -1, "residual is no value"),
    ],
)
def test_a_record_of_state_that_lies(operation: str, field: str, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^operation [0-9]+.*{message}"):
        _ = spoilt(subject("plain", "Q4_0", "bf16"), operation, field, value).checked


# What operations have no use for: their records may hold anything there.
IGNORED = {
    "embed": "digits x residual stride weight bias eps q_norm k_norm",
    "embed_one_row": "digits x residual stride weight bias eps q_norm k_norm",
    "embed_positions": "digits x residual stride weight bias eps q_norm k_norm",
    "norm": "digits residual stride bias layer q_norm k_norm",
    "norm_quantise": "residual stride bias layer q_norm k_norm",
    "layer_norm": "digits residual stride layer q_norm k_norm",
    "layer_norm_quantise": "residual stride layer q_norm k_norm",
    "linear": "weight eps layer q_norm k_norm",
    "linear_gated": "weight eps layer q_norm k_norm",
    "rope_write": "residual weight bias eps",
    "attend": "residual bias q_norm k_norm",
    "attend_sinks": "residual q_norm k_norm",
    "attend_both_ways": "residual width weight bias q_norm k_norm",
    "expert_bias": "digits bias eps q_norm k_norm",
    "clamped_swiglu": "digits stride weight bias layer q_norm k_norm",
    "scale": "digits residual stride weight bias layer q_norm k_norm",
    "soft_cap": "digits residual stride weight bias layer q_norm k_norm",
    "quantise": "residual stride weight bias eps layer q_norm k_norm",
    "relu_squared_quantise": "residual stride weight bias eps layer q_norm k_norm",
    "rope_write_scaled": "residual bias eps",
    "relu": "digits residual stride weight bias eps layer q_norm k_norm",
    "relu_quantise": "residual stride weight bias eps layer q_norm k_norm",
    "gelu": "digits residual stride weight bias eps layer q_norm k_norm",
    "silu": "digits residual stride weight bias eps layer q_norm k_norm",
    "silu_quantise": "residual stride weight bias eps layer q_norm k_norm",
    "gelu_tanh_gated": "digits residual stride weight bias eps layer q_norm k_norm",
    "gelu_tanh_gated_quantise": "residual stride weight bias eps layer q_norm k_norm",
    "gelu_quantise": "residual stride weight bias eps layer q_norm k_norm",
    "take_rows": "digits residual stride weight bias eps layer q_norm k_norm",
    "route": "digits stride weight bias eps q_norm k_norm",
    "route_all": "digits stride weight bias eps q_norm k_norm",
    "route_scores_all": "bias q_norm k_norm",
    "route_sigmoid": "bias q_norm k_norm",
    "expert_linear": "weight bias eps q_norm k_norm",
    "expert_linear_ranked": "weight bias eps q_norm k_norm",
    "expert_linear_gated": "weight bias eps q_norm k_norm",
    "combine": "digits stride weight bias eps q_norm k_norm",
    "sigmoid_scale": "digits stride weight bias eps layer q_norm k_norm",
    "cut_heads": "residual weight bias eps q_norm k_norm",
    "join_heads": "digits weight bias eps q_norm k_norm",
    "join_heads_sharing": "digits weight bias eps q_norm k_norm",
    "add": "digits stride weight bias eps layer q_norm k_norm",
    "mul": "digits stride weight bias eps layer q_norm k_norm",
    "mul_quantise": "stride weight bias eps layer q_norm k_norm",
    "sigmoid_mul": "digits stride weight bias eps layer q_norm k_norm",
    "sigmoid_mul_quantise": "stride weight bias eps layer q_norm k_norm",
    "silu_apart": "digits stride weight bias eps layer q_norm k_norm",
    "silu_apart_quantise": "stride weight bias eps layer q_norm k_norm",
    "norm_heads": "digits residual stride bias q_norm k_norm",
    "norm_heads_quantise": "residual stride bias q_norm k_norm",
    "causal_conv": "digits residual eps q_norm k_norm",
    "causal_conv_silu": "digits residual eps q_norm k_norm",
    "rope_queries": "residual weight bias eps layer k_norm",
    "rope_queries_scaled": "residual bias eps layer k_norm",
    "rope_queries_normed": "residual weight bias eps layer k_norm",
    "delta_rule": "",
    "delta_rule_tiled": "",
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_every_field_that_an_operation_uses_is_checked(model: tuple[str, str, str]) -> None:
    """Each number of each record, far outside, is refused, but for the names of values and what is not used at all."""
    of = subject(*model)
    numbers, start = from_bytes(of.code, native.versions())[0].code, 0
    while start < len(numbers):
        operation = native.operations()[numbers[start]]
        ignored = set()
        for at, field in enumerate(RECORD):
            if field in RECORD[at - 1 : at] or field not in ("x", "y", "residual"):
                lowered, changed = from_bytes(of.code, native.versions())[0], numbers.copy()
                changed[start + at] = 0x7FF0000000000000 if field == "eps" else (1 << 62) + 1
                vars(lowered)["code"] = changed
                try:
                    _ = lowered.checked
                except ConfigError:
                    continue
                ignored.add(field)
        # A residual that is no value is not read.
        absent = {"residual"} if numbers[start + RECORD.index("residual")] < 0 else set()
        assert ignored == set(IGNORED[operation].split()) | absent
        start += len(RECORD) + int(numbers[start + RECORD.index("pieces")]) * len(native.piece_fields())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", 0),
        ("vocab", 1 << 40),
        ("table", 1 << 45),
        ("nbytes", 0),
        ("arena", (0, 64, 64)),
        ("logits", (1, 0, 0, -64)),
    ],
)
def test_sizes_that_lie(llama: Subject, field: str, value: Any) -> None:
    lowered, _ = from_bytes(llama.code, native.versions())
    vars(lowered)[field] = value
    with pytest.raises(ConfigError, match=r"cannot be|a place outside"):
        _ = lowered.checked


@pytest.mark.parametrize(
    ("field", "value"), [("kv_heads", 0), ("kv_heads", 3), ("head_dim", 0), ("head_dim", 1024), ("layers", -1)]
)
def test_shapes_that_lie(llama: Subject, field: str, value: int) -> None:
    lowered, _ = from_bytes(llama.code, native.versions())
    vars(lowered.attentions[0])[field] = value
    with pytest.raises(ConfigError, match="cannot be"):
        _ = lowered.checked


def test_a_step_that_needs_more_than_the_memory(llama: Subject) -> None:
    lowered, identity = from_bytes(llama.code, native.versions())
    vars(lowered)["arena"] = (1 << 40, 1 << 40, 1 << 40)
    model = llama.executable._model
    lies = type(model)(lowered, identity, model.prices, model.program, model.kv_dtype)
    with pytest.raises(CapacityError, match="Lower max_batch_tokens or max_running"):
        CpuExecutable(lies, llama.executable.image, Capacity(LIMITS, 128, PAGES), isa="portable", threads=1)


@pytest.mark.parametrize(
    ("field", "at", "value"),
    [
        ("header", 0, LIMITS.tokens + 1),
        ("header", 0, -1),
        ("header", 1, LIMITS.segments + 1),
        ("header", 2, LIMITS.rows + 1),
        ("pages", 1, PAGES),
        ("pages", 0, -1),
        ("positions", 3, 4),
        ("positions", 3, 1 << 30),
        ("context_len", 0, 200),
        ("context_len", 0, 1 << 30),
        ("seg_start", 1, 41),
        ("seg_start", 0, 1),
        ("page_start", 1, 1),
        ("page_start", 1, 1 << 20),
        ("logit_rows", 0, 40),
        ("logit_rows", 0, -1),
    ],
)
def test_a_step_outside_the_limits_is_refused(llama: Subject, field: str, at: int, value: int) -> None:
    """A wrong count or page would be a write outside the cache."""
    batch = llama.executable.batch
    batch.fill([Segment(list(range(40)), 0, [3, 4, 5])], [39])
    getattr(batch, field)[at] = value
    with pytest.raises(ValueError, match="the step"):
        llama.executable.forward()
    batch.fill([Segment(list(range(40)), 0, [3, 4, 5])], [39])
    llama.executable.forward()


def test_ids_of_sampling_lie_in_the_vocabulary(llama: Subject) -> None:
    executable = llama.executable
    executable.batch.fill([Segment([1, 2], 0, [0])], [0, 1])
    executable.forward()
    assert (executable.sample(choosing(2, 300)).ids >= 0).all()
    for field, values in (
        ("hist_ids", [0, 300]),
        ("hist_ids", [-1, 0]),
        ("hist_start", [0, 1, 3]),
        ("hist_start", [0, 2, 1]),
    ):
        rows: SampleRows = choosing(2, 300)
        setattr(rows, field, np.array(values, np.int32))
        with pytest.raises(ValueError, match="not in the vocabulary, or lists that do not fit"):
            executable.sample(rows)
    with pytest.raises(ValueError, match="one entry for each logit row"):
        executable.sample(choosing(3, 300))


def crafted(tries: int, seed: int) -> None:
    """In a process of its own, which may die."""
    script = Path(__file__).with_name("crafted_code.py")
    command = [sys.executable, str(script), "--tries", str(tries), "--seed", str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 failed") == len(MODELS)


def test_crafted_code_is_refused_or_runs() -> None:
    crafted(200, 0)


@pytest.mark.slow
@pytest.mark.soak
def test_much_crafted_code_is_refused_or_runs() -> None:
    crafted(10_000, 1)


def test_a_model_as_it_was_compiled_runs(llama: Subject) -> None:
    assert attempt(llama, llama.code) == "run"
