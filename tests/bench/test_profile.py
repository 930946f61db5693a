"""Figures of a profile: what is added up, what is refused; and the real thing on SmolLM2."""

import json
from pathlib import Path

import profile_builders as made
import pytest

from roofline.bench.profile import profile
from roofline.bench.profile.profile import Profiled, ProfiledStep, Timing, fastest, fill, run
from roofline.common.errors import CapacityError
from roofline.hardware.roofs import reachable
from roofline.program.passes.price import amount, price
from tests.command_line import call_roofline

DECODE, PREFILL = ProfiledStep(1, 50), ProfiledStep(64)


@pytest.mark.parametrize("step", [DECODE, PREFILL, ProfiledStep(1, 9, batch=3)])
def test_rows_add_up_to_the_program(step: ProfiledStep) -> None:
    profile = made.made(step, [1e-5] * made.COUNT)
    total = amount(price(made.PROGRAM).total, step.work())
    assert sum(op.read_bytes for op in profile.ops) == total.weight_bytes + total.kv_bytes
    assert sum(op.flops for op in profile.ops) == total.flops
    assert sum(op.act_bytes for op in profile.ops[:-1]) == total.act_bytes
    assert sum(op.seconds for op in profile.ops) == pytest.approx(made.COUNT * 1e-5 + 2e-6)
    assert profile.unexplained_seconds == pytest.approx(1e-6)
    assert profile.explained == pytest.approx(1 - 1e-6 / profile.timed_seconds)


def test_clocks_are_told_apart_from_what_is_unexplained() -> None:
    each = [1e-5] * made.COUNT
    whole = sum(each) + 3e-6
    slowed = made.made(DECODE, each, plain=0.9 * whole)
    assert slowed.step_seconds == pytest.approx(0.9 * whole)
    assert slowed.clock_cost == pytest.approx(1 / 0.9 - 1)
    assert slowed.unexplained_seconds == pytest.approx(1e-6)
    assert made.made(DECODE, each, plain=2 * whole).clock_cost == 0, "clocks make no step faster"


def test_like_ops_of_all_layers_are_one_row() -> None:
    decode = made.made(DECODE, [1e-5] * made.COUNT)
    by_op = {(op.section, op.op, op.shape): op.calls for op in decode.ops}
    assert by_op["layers", "norm_quantize", "64"] == 2 * made.MODEL.cfg.layers
    assert by_op["layers", "linear", "64 → 128"] == made.MODEL.cfg.layers
    assert by_op["layers", "attend", "4/2 × 16"] == made.MODEL.cfg.layers
    assert decode.ops[-1].op == "sample"
    # A row alone in its segment is rotated and written by attention: one row for both, in decoding only.
    assert "rope_kv_write" not in {op.op for op in decode.ops}
    assert "rope_kv_write" in {op.op for op in made.made(PREFILL, [1e-5] * made.COUNT).ops}


def test_bounds() -> None:
    model = made.builders.build(made.builders.WIDE | {"ffn": 8192}, "Q8_0")
    program = made.compile_program(model.family, model.cfg, model.tensors, made.CPU)
    each = [1.0] * len(price(program).instrs)

    def bounds(step: ProfiledStep) -> dict[str, str]:
        found = made.summarise(program, step, [Timing(each, 1e-6, sum(each))], [sum(each)], made.ROOFS)
        return {op.op: op.bound for op in found.ops if op.shape != "96" and op.section != "head"}

    decode, prefill = bounds(ProfiledStep(1, 8)), bounds(ProfiledStep(2000))
    assert decode["linear_silu_mul"] == decode["linear_add"] == "memory"
    assert decode["norm_quantize"] == decode["attend"] == "latency"
    assert prefill["linear_silu_mul"] == "int8"
    assert prefill["attend"] == "bf16"
    assert prefill["norm_quantize"] == "f32"


def test_the_highest_share_is_an_ops_or_the_steps() -> None:
    fast = made.made(DECODE, [1e-12] * made.COUNT)
    assert fast.highest_share == max(op.share for op in fast.ops) > 1
    roofs = reachable(made.ROOFS, lambda roofs: made.made(DECODE, [1e-12] * made.COUNT, roofs=roofs).highest_share,
                    lambda: made.ROOFS)  # fmt: skip
    assert made.made(DECODE, [1e-12] * made.COUNT, roofs=roofs).highest_share == pytest.approx(1)
    assert roofs.correction == pytest.approx(fast.highest_share)


def test_the_mean_of_the_fastest_runs_counts() -> None:
    runs = [Timing([seconds, 2 * seconds], 1.0, 3 * seconds + 1) for seconds in range(1, 25)]
    assert fastest(runs) == Timing([2.0, 4.0], 1.0, 7.0)  # three of 24


def test_figures_are_told_where_the_picture_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Profiled("m", {}, (made.made(DECODE, [1e-5] * made.COUNT),))
    monkeypatch.setattr(profile, "profile_model", lambda model, steps, load: measured)
    told = call_roofline(["profile", "m", "--svg", "/dev/full"])
    assert (told.exit_code, told.stderr) == (1, "roofline: /dev/full: the disk is full\n")
    assert "norm_quantize" in told.stdout
    assert "drawn" not in told.stdout


@pytest.fixture(scope="module")
def profiled(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """JSON and picture of a decode and a prefill step of SmolLM2."""
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    svg = tmp_path_factory.mktemp("profile") / "roofline.svg"
    steps = ["--decode", "64", "--prefill", "32", "--json", "--svg", str(svg)]
    out = call_roofline(["--debug", "profile", str(smollm2_path), *steps])
    assert out.exit_code == 0, out.output
    return json.loads(out.stdout), svg.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("step", [ProfiledStep(1, 64), ProfiledStep(32)])
def test_ops_explain_the_step(smollm2_path: Path, step: ProfiledStep) -> None:
    """In the run that other programs disturbed least, the ops and sampling take all of the step but 5 %."""
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    from roofline import bundle

    executable = bundle.load(str(smollm2_path), cache_tokens=128, max_running=1, text=False).executable
    try:
        fill(executable, step)
        runs = [run(executable, step, clocks=True) for _ in range(40)]
        explained = [(sum(timing.ops) + timing.sample) / timing.total for timing in runs]
        assert all(len(timing.ops) == len(executable.program.body) for timing in runs)
        assert all(seconds > 0 for timing in runs for seconds in timing.ops)
        assert 0.95 <= max(explained) <= 1.0
    finally:
        executable.close()


@pytest.mark.slow
def test_record_of_a_real_profile(profiled: tuple[dict, str]) -> None:
    for step in profiled[0]["steps"]:
        spent = sum(op["seconds"] for op in step["ops"])
        assert step["explained"] == pytest.approx(spent / step["timed_seconds"])
        assert 0 < step["explained"] <= 1  # how much of an undisturbed run it is: the test above
        assert 0 < step["share_of_roof"] <= 1.0001


@pytest.mark.slow
def test_bytes_are_what_show_says(profiled: tuple[dict, str], smollm2_path: Path) -> None:
    from roofline.models.registry import configure
    from roofline.program.compile import compile_program
    from roofline.program.overview import LAST, overview
    from roofline.program.passes.price import Work, segment_work
    from roofline.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(smollm2_path)
    family, cfg = configure(checkpoint.config)
    program = compile_program(family, cfg, checkpoint.tensors, made.CPU)
    decode, prefill = profiled[0]["steps"]
    for step, tokens, context in ((decode, 1, 64), (prefill, 32, 0)):
        shown = overview(program, Work(tokens, 1, *segment_work(context, tokens)), None)
        assert step["read_bytes"] == shown.spent.weight_bytes + shown.spent.kv_bytes
        assert step["flops"] == shown.spent.flops
        for row in shown.rows:
            if row.section == LAST:
                continue  # one row stands there for ops that the profile names one by one
            same = [op for op in step["ops"] if (op["op"], op["shape"]) == (row.op, row.shape)]
            if row.op != "rope_kv_write" or tokens > 1:
                assert same, row
                assert all(op["format"] == row.format for op in same if op["section"] in row.section)


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each_step(profiled: tuple[dict, str]) -> None:
    assert "decode 1 token after 64" in profiled[1]
    assert "prefill 32 tokens" in profiled[1]


def test_a_step_longer_than_the_model_is_refused(smollm2_path: Path) -> None:
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    from roofline.bench.profile.profile import profile_model

    with pytest.raises(CapacityError, match=r"9,001 positions"):
        profile_model(str(smollm2_path), [ProfiledStep(1, 9000)])


def test_only_writes_of_pages_are_told_with_what_reads_them() -> None:
    """What writes recurrent state is computed by itself."""
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    from tests.backends import hybrid_models

    program = hybrid_models.compiled(hybrid_models.checkpoint("plain"))
    names = {label.op for label in profile._merged(program, DECODE)}
    assert {"causal_conv", "delta_rule", "attend"} <= names
    assert "rope_kv_write" not in names
