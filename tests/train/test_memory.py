"""What a process takes: rehearsed as torch does it, added up by part, and measured."""

import json
import math
import mmap
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.models import presets  # noqa: E402
from roofline.train.config.read import parse_config  # noqa: E402
from roofline.train.config.schema import TrainConfig  # noqa: E402
from roofline.train.memory import estimate  # noqa: E402
from roofline.train.memory import meter as meter_module  # noqa: E402
from roofline.train.memory.dry_run import ACTIVATIONS, GRADIENTS, LOGITS, DryRunUsage, Ledger, dry_run  # noqa: E402
from roofline.train.memory.estimate import Memory  # noqa: E402
from roofline.train.memory.meter import MemoryMeter  # noqa: E402
from roofline.train.model.adaptation import forms  # noqa: E402
from roofline.train.model.chunked_loss import chunk_rows  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.weights.names import parameter_shapes  # noqa: E402

LENGTH = 32


@pytest.fixture(autouse=True)
def each_dry_run_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others share them (tests/conftest.py)."""
    monkeypatch.setattr(estimate, "dry_run", dry_run)


SHAPES = {
    "mpt": presets.preset("mpt-125m") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16},
    "llama": presets.preset("smollm2-135m") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16},
    "alibi": presets.preset("mpt-125m-alibi") | {"width": 64, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16},
}
SHAPES = {name: shape | {"ffn": 128, "vocab": 96, "max_position": 64} for name, shape in SHAPES.items()}


def made(**changes: Any) -> TrainConfig:
    given = {
        "max_seq_len": LENGTH,
        "model": {"name": "mpt-125m"},
        "train_loader": {"name": "synthetic"},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "max_duration": "3ba",
        "global_train_batch_size": 8,
        "precision": "fp32",
        "device": "cpu",
    }
    return parse_config(given | changes)


def test_a_ledger_counts_until_a_tensor_is_dropped() -> None:
    with Ledger() as ledger:
        a = torch.zeros(1000)
        view = a[:10]
        b = a + 1
        del a
        assert ledger.usage.parts == {ACTIVATIONS: 8000}
        ledger.part = LOGITS
        c = view + 1  # `a` lives on in its view
        assert ledger.usage.parts == {ACTIVATIONS: 8000, LOGITS: 40}
        del view, c
        ledger.begin()
        assert ledger.usage.parts == {ACTIVATIONS: 4000, LOGITS: 0}
    assert b.numel() == 1000


@pytest.mark.parametrize(
    "again", [*(pytest.param(each, marks=pytest.mark.slow) for each in (False, True)), "selective"]
)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "amp_bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_rehearsal_is_as_the_play(name: str, precision: str, again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data torch makes and keeps what it does with data."""
    config = made(precision=precision, fsdp_config={"activation_checkpointing": again})
    args = (config, SHAPES[name], World(), torch.float32, 4, True)
    found = dry_run(*args)
    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", nullcontext)
    real = dry_run(*args)
    assert found == real
    assert found.parts[GRADIENTS] == 4 * presets.parameter_count(SHAPES[name])


ADAPTERS = ({"method": "dora", "base": "f32"}, {"base": "nf4"})


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_a_model_beside_adapters_is_rehearsed(adapter: dict[str, Any]) -> None:
    """Whatever holds it: tests of runs with adapters rehearse one of them (dry_runs.py). Adapters alone have gradients,
    in float32."""
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "a folder"}
    config = made(model=model, adapter={"rank": 4, **adapter})
    planned = forms(config, SHAPES["llama"])
    trained = sum(math.prod(shape) for form in planned.values() for shape in form.trained.values())
    assert trained > 0
    for several in (None, False):
        usage = dry_run(config, SHAPES["llama"], World(), torch.float32, 4, several, planned)
        assert usage.most.get(GRADIENTS, 0) == (0 if several is None else 4 * trained)


@pytest.mark.slow
def test_what_makes_it_smaller() -> None:
    def rehearsed(rows: int = 8, **changes: Any) -> dict[str, int]:
        return dry_run(made(**changes), SHAPES["llama"], World(), torch.float32, rows, False).most

    plain = rehearsed()
    assert rehearsed(16)[ACTIVATIONS] == pytest.approx(2 * plain[ACTIVATIONS], rel=0.05)
    full, kept = (
        rehearsed(fsdp_config={"activation_checkpointing": again})[ACTIVATIONS] for again in (True, "selective")
    )
    assert full < kept < plain[ACTIVATIONS]
    assert rehearsed(precision="amp_bf16")[ACTIVATIONS] < 0.8 * plain[ACTIVATIONS]


def test_documents_apart_need_a_mask() -> None:
    apart = made(model={"name": "mpt-125m", "attn_config": {"attn_uses_sequence_id": True}})
    with_mask = dry_run(apart, SHAPES["llama"], World(), torch.float32, 8, False).most[ACTIVATIONS]
    without = dry_run(made(), SHAPES["llama"], World(), torch.float32, 8, False).most[ACTIVATIONS]
    assert with_mask >= without + 4 * 8 * LENGTH * LENGTH


def test_a_prediction_adds_up() -> None:
    shape = SHAPES["mpt"]
    weights = 4 * presets.parameter_count(shape)
    found = Memory(made(), shape, World()).predicted
    assert found is not None
    assert found.rows == 8
    assert found.total == sum(found.parts.values())
    assert (found.parts["parameters"], found.parts["optimizer"]) == (weights, 2 * weights)
    assert "checkpoint" not in found.parts
    saved = Memory(made(save_interval="1ba"), shape, World()).predicted
    assert saved is not None
    assert saved.parts["checkpoint"] == 3 * weights
    muon = Memory(made(optimizer={"name": "muon", "lr": 1e-3}), shape, World()).predicted
    assert muon is not None
    hidden = 4 * 3 * (4 * 64 * 64 + 2 * 64 * 128)
    assert muon.parts["optimizer"] == 2 * weights - hidden
    less = Memory(made(device_train_microbatch_size=2), shape, World()).predicted
    assert less is not None
    assert less.rows == 2
    assert less.parts["gradients"] == weights  # the second microbatch finds those of the first
    assert less.parts[ACTIVATIONS] < found.parts[ACTIVATIONS] / 3


def test_what_cannot_be_rehearsed_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise NotImplementedError("an op of someone's")

    monkeypatch.setattr(estimate, "dry_run", fails)
    assert Memory(made(), SHAPES["mpt"], World()).predicted is None


def test_the_meter_sees_what_comes_and_goes() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    if meter.peak() is None:
        pytest.skip("this system does not say how much memory a process has")
    with mmap.mmap(-1, 192 << 20) as held:  # not of the C library, which may keep what it has
        for _ in range(192):
            held.write(bytes(1 << 20))
    peak = meter.peak()
    assert peak is not None
    assert peak == pytest.approx(192 << 20, rel=0.1)
    meter.restart()
    later = meter.peak()
    assert later is None or later < 64 << 20


def test_a_peak_that_is_not_forgotten_is_not_taken_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox that takes the request, and does nothing."""
    found = {"RssAnon": 100 << 20, "RssFile": 50 << 20, "VmRSS": 150 << 20, "VmHWM": 150 << 20}
    monkeypatch.setattr(meter_module, "_status", lambda: found)
    meter = MemoryMeter(torch.device("cpu"))
    found["VmHWM"] = 400 << 20
    assert meter.peak() == 250 << 20
    meter.restart()
    assert meter.peak() is None
    found["VmHWM"] = 410 << 20
    assert meter.peak() == 260 << 20


CASES = {
    "mpt fp32": ["mpt-125m", "model.config_overrides={width: 128, heads: 4, layers: 6, vocab: 4096, ffn: 512}"],
    "llama bf16": [
        "smollm2-135m",
        "model.config_overrides={width: 160, heads: 5, kv_heads: 1, head_dim: 32, layers: 5, vocab: 8192, ffn: 512}",
        "precision=amp_bf16",
    ],
    "large weights": [
        "mpt-125m",
        "model.config_overrides={width: 512, heads: 8, layers: 6, vocab: 32768, ffn: 2048}",
        "global_train_batch_size=2",
        "max_seq_len=128",
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_predictions_hold_on_this_cpu(name: str, tmp_path: Path) -> None:
    """A process of its own for each: what one has freed would hide what the next takes."""
    what, *changes = CASES[name]
    settings = ["precision=fp32", "max_seq_len=256", "global_train_batch_size=24", "device_train_microbatch_size=12"]
    words = [f"--set={change}" for change in (*settings, *changes)]
    code = "import sys; from roofline.cli.main import main; sys.argv[0] = 'roofline'; sys.exit(main())"
    record = tmp_path / "record.json"
    command = [sys.executable, "-c", code, "bench", "train", what, "--steps=3", "--warmup=1", f"--out={record}", *words]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(record.read_text())["card"]["memory"]
    if found["measured"] is None:
        pytest.skip("this system does not forget a process's peak memory: nothing is measured of the steps alone")
    assert found["measured"] > 300e6
    assert found["predicted"]["total"] == pytest.approx(found["measured"], rel=0.2)


@pytest.mark.slow
def test_rows_that_are_predicted_to_fit_are_tried_first() -> None:
    config = made(global_train_batch_size=1024, device_train_microbatch_size=1024)
    memory = Memory(config, SHAPES["mpt"], World())
    assert memory.predicted is not None
    most = memory.predicted.total
    assert memory.rows_for(most) is None
    rows = memory.rows_for(most // 2)
    assert rows in (512, 256, 128)
    assert memory.predicted is not None
    assert memory.predicted.rows == memory.rows == rows
    assert memory.predicted.total <= most // 2
    assert memory.rows_for(1) == 1, "less than one row is tried, and refused if it does not fit"


def test_an_evaluation_of_more_rows_is_predicted() -> None:
    plain = Memory(made(), SHAPES["mpt"], World()).predicted
    evaluated = made(eval_loader={"name": "synthetic"}, device_eval_batch_size=512)
    more = Memory(evaluated, SHAPES["mpt"], World()).predicted
    assert plain is not None
    assert more is not None
    assert more.total > 1.3 * plain.total


@pytest.mark.slow
def test_the_first_chunk_of_logits_stands_for_all() -> None:
    shape = SHAPES["mpt"] | {"vocab": 4096}
    tokens = chunk_rows(4096)

    def most(chunks: int) -> int:
        rows = chunks * tokens // LENGTH
        return dry_run(made(), shape, World(), torch.float32, rows, False).most[LOGITS]

    assert most(1) == most(2) == most(8)
    assert most(1) > 4 * tokens * 4096  # its logits, in 32 bits


def test_an_evaluation_takes_no_gradients() -> None:
    """Of the head's chunks neither: inside of an autograd function torch does not show no_grad."""
    from roofline.train.model.modules import Model

    model = Model(SHAPES["mpt"], "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    seen = []
    plain = model.head_loss
    model.head_loss = lambda *tensors: seen.append(torch.is_grad_enabled()) or plain(*tensors)  # type: ignore[func-returns-value]
    ids = torch.zeros((2, 8), dtype=torch.int64)
    with torch.no_grad():
        model(ids, ids)
    model(ids, ids).backward()
    assert seen == [False, True]


USAGE = DryRunUsage({ACTIVATIONS: 1000, LOGITS: 100, GRADIENTS: 10}, {ACTIVATIONS: 1200, LOGITS: 150, GRADIENTS: 10})


def parts_of(world: World, **changes: Any) -> dict[str, int]:
    return estimate._parts(made(**changes), SHAPES["mpt"], world, USAGE)


def sharded(shards: int, kind: str = "cpu") -> World:
    mesh: Any = SimpleNamespace(mesh=torch.zeros(shards, 1))
    return World(size=shards, grouped=True, mesh=mesh, device=torch.device(kind))


WHOLE = presets.parameter_count(SHAPES["mpt"])
BLOCK = WHOLE - presets.parameter_count(SHAPES["mpt"] | {"layers": 2})
OUTER = WHOLE - 3 * BLOCK


def test_what_a_cpu_s_libraries_take_is_added() -> None:
    heap = {"parameters": 4 * WHOLE, "optimizer": 8 * WHOLE, ACTIVATIONS: 1000, LOGITS: 100, GRADIENTS: 10}
    assert parts_of(World()) == heap | {"libraries": 35 << 20, "allocator": int(0.55 * 1110)}
    compiled = parts_of(World(), compile_config={})
    assert (compiled["libraries"], compiled["allocator"]) == ((35 + 170) << 20, int(0.3 * 1110))
    mostly_logits = DryRunUsage({ACTIVATIONS: 100, LOGITS: 1000}, {})
    for changes, allocator in (({}, 1000), ({"compile_config": {}}, 330)):
        assert estimate._parts(made(**changes), SHAPES["mpt"], World(), mostly_logits)["allocator"] == allocator
    on_a_gpu = World(device=torch.device("cuda"))
    assert parts_of(on_a_gpu, save_interval="1ba") == heap
    assert "checkpoint" not in parts_of(World(), save_interval="0ba")
    for name, moments in (("adamw", 2), ("decoupled_adamw", 2), ("decoupled_lionw", 1)):
        found = parts_of(World(), optimizer={"name": name, "lr": 1e-3}, save_interval="1ba")
        assert found["optimizer"] == moments * 4 * WHOLE
        assert found["checkpoint"] == (1 + moments) * 4 * WHOLE


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_are_of_whole_rows(shards: int) -> None:
    shapes = parameter_shapes(SHAPES["mpt"]).values()
    share = sum(4 * math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes)
    found = parts_of(sharded(shards))
    assert (found["parameters"], found["optimizer"], found[GRADIENTS]) == (share, 2 * share, share)


@pytest.mark.parametrize(
    ("changes", "width", "sent"),
    [
        ({}, 4, 4),
        ({"precision": "amp_bf16"}, 2, 4),
        ({"precision": "amp_bf16", "fsdp_config": {"mixed_precision": "PURE"}}, 2, 2),
        ({"precision": "amp_bf16", "fsdp_config": {"mixed_precision": "FULL"}}, 4, 4),
        ({"fsdp_config": {"mixed_precision": "PURE"}}, 4, 4),
    ],
)
def test_sharded_blocks_are_gathered_by_twos(changes: dict[str, Any], width: int, sent: int) -> None:
    """And one of them once more, as it travels; a block's gradients are there, and twice on their way."""
    travelling = BLOCK * (width + 2 * sent)
    assert parts_of(sharded(2), **changes)["gathered"] == width * (OUTER + 3 * BLOCK) + travelling
    kept = dict(changes.get("fsdp_config", {}), sharding_strategy="SHARD_GRAD_OP")
    found = parts_of(sharded(2), **changes | {"fsdp_config": kept})
    assert found["gathered"] == width * (OUTER + 4 * BLOCK) + travelling
    assert found[GRADIENTS] == 4 * WHOLE


@pytest.mark.parametrize(("virtual", "waiting"), [(2, 3), (4, 4), (8, 5)])
def test_an_elastic_run_keeps_sums_that_wait_for_their_other_half(virtual: int, waiting: int) -> None:
    found = parts_of(sharded(2), elastic={"virtual_shards": virtual}, precision="amp_bf16")
    assert found[GRADIENTS] == waiting * 4 * WHOLE
    pure = {"fsdp_config": {"mixed_precision": "PURE"}, "elastic": {"virtual_shards": virtual}, "precision": "amp_bf16"}
    assert parts_of(sharded(2), **pure)["gathered"] == 2 * (OUTER + 3 * BLOCK) + BLOCK * (2 + 2 * 4)


def test_as_many_rows_are_tried_as_are_predicted_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row takes 1000 bytes, and 1550 of the C library's heap."""

    def usage(config: Any, shape: Any, world: Any, dtype: Any, rows: int, *rest: Any) -> DryRunUsage:
        return DryRunUsage({ACTIVATIONS: 1000 * rows}, {ACTIVATIONS: 1000 * rows})

    monkeypatch.setattr(estimate, "dry_run", usage)

    def rows_for(available: int) -> int | None:
        memory = Memory(made(global_train_batch_size=64), SHAPES["mpt"], World())
        assert memory.rows == 64
        found = memory.rows_for(available)
        assert memory.predicted is not None
        assert memory.predicted.rows == memory.rows == (found or 64)
        return found

    base = 12 * WHOLE + (35 << 20)
    assert rows_for(base + 1550 * 64) is None
    assert rows_for(base + 1550 * 64 - 1) == 32
    assert rows_for(base + 1550 * 32) == 32
    assert rows_for(base + 1550 * 32 - 1) == 16
    assert rows_for(base + 1550 * 2) == 2
    assert rows_for(base + 1550 * 2 - 1) == 1
    assert rows_for(0) == 1
    alone = Memory(made(global_train_batch_size=1), SHAPES["mpt"], World())
    assert alone.rows_for(0) is None, "one row is all there is"


@pytest.mark.parametrize(
    ("batch", "size", "processes", "rows"),
    [(8, "auto", 1, 8), (8, 3, 1, 3), (8, 9, 1, 8), (9, "auto", 2, 5), (1, 4, 2, 1)],
)
def test_a_microbatch_has_at_most_the_rows_of_a_process(batch: int, size: Any, processes: int, rows: int) -> None:
    config = made(global_train_batch_size=batch, device_train_microbatch_size=size)
    assert Memory(config, SHAPES["mpt"], World(size=processes)).rows == rows


@pytest.mark.parametrize(
    ("kind", "parameters", "length", "rows"),
    [
        ("cpu", 10**8, 256, 8),
        ("cpu", 10**8, 300, 7),
        ("cpu", 10**8, 4096, 1),
        ("cpu", 10**6, 2048, 9),
        ("cpu", 10**6, 256, 16),
        ("cuda", 10**8, 256, 16),
    ],
)
def test_a_cpu_computes_no_more_rows_at_a_time_than_its_speed_needs(
    monkeypatch: pytest.MonkeyPatch, kind: str, parameters: int, length: int, rows: int
) -> None:
    monkeypatch.setattr(estimate.presets, "parameter_count", lambda shape: parameters)
    usage = DryRunUsage({ACTIVATIONS: 1}, {ACTIVATIONS: 1})
    monkeypatch.setattr(estimate, "dry_run", lambda *arguments: usage)
    monkeypatch.setattr(estimate, "free_memory", lambda device: 7)
    monkeypatch.setattr(estimate, "MemoryMeter", lambda device: None)
    config = made(global_train_batch_size=16, max_seq_len=length)
    memory = Memory(config, SHAPES["mpt"], World(device=torch.device(kind)))
    assert (memory.rows, memory.free) == (rows, 7)
    named = config.model_copy(update={"device_train_microbatch_size": 12})
    assert Memory(named, SHAPES["mpt"], World(device=torch.device(kind))).rows == 12, "what is named is not changed"


def test_a_compiled_block_keeps_what_was_measured() -> None:
    memory = Memory(made(compile_config={}, precision="amp_bf16"), SHAPES["mpt"], World())
    usage = DryRunUsage({GRADIENTS: 10}, {LOGITS: 10_000_000}, first=7)
    found = memory._compiled_usage(usage, 1000)
    assert found.parts == {ACTIVATIONS: 7 + 3 * 1000, LOGITS: 10_000_000, GRADIENTS: 10, estimate.PASSING: 0}


def test_the_peak_is_that_of_the_rank_that_has_most() -> None:
    memory = Memory(made(), SHAPES["mpt"], World())
    memory._meter = SimpleNamespace(peak=lambda: None, restart=lambda: None)  # type: ignore[assignment]
    assert memory.peak() is None
    for own in (0, 1 << 30):
        memory._meter.peak = lambda own=own: own  # type: ignore[method-assign]
        assert memory.peak() == own
