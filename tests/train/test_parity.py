"""`parity`: verdicts on series whose truth is known, how often they are wrong, planted faults found and named."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline.common.errors import ConfigError
from roofline.train.data.order import Order, Stream
from roofline.train.data.receipts import ReceiptLog
from roofline.train.parity import recorded_run
from roofline.train.parity.compare import compare, pair
from roofline.train.parity.findings import Parity, SampleAgreement
from roofline.train.parity.recorded_run import RecordedRun, read_run
from roofline.train.parity.statistics import change, correlation_time, jumps, mean, spike, t_quantile, t_tail

STEPS = 240


def noise(seed: int, steps: int = STEPS, correlation: float = 0.5, sd: float = 0.004) -> np.ndarray:
    """Each value takes `correlation` of the one before."""
    fresh = np.random.default_rng(seed).standard_normal(steps + 100)
    for i in range(1, len(fresh)):
        fresh[i] += correlation * fresh[i - 1]
    return fresh[100:] * sd * np.sqrt(1 - correlation**2)


def run(difference: Any = 0.0, steps: int = STEPS, norm: Any = 1.0, name: str = "run") -> RecordedRun:
    """A falling loss, `difference` added."""
    at = np.arange(steps)
    loss = 3 + 4 * np.exp(-at / 50) + difference
    norms = np.ones(steps) * np.exp(np.random.default_rng(9).standard_normal(steps)) * norm
    return RecordedRun(Path(name), at + 1, loss, norms, (), None, ())


def verdict(difference: Any, steps: int = STEPS, **options: Any) -> Parity:
    return compare(run(steps=steps), run(difference, steps), **options)


def since(step: int, size: float) -> np.ndarray:
    return size * (np.arange(STEPS) >= step)


def test_the_same_bits_are_identical() -> None:
    found = verdict(0.0)
    assert (found.verdict, found.equal, found.steps) == ("identical", True, STEPS)
    nothing = np.full(STEPS, np.nan)
    assert compare(replace(run(), norm=nothing), replace(run(), norm=nothing)).verdict == "identical"
    tiny = np.zeros(STEPS)
    tiny[100] = 1e-15
    assert verdict(tiny).verdict == "equivalent"
    assert compare(run(), run(norm=1 + tiny)).verdict == "equivalent"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("difference", "expected", "said"),
    [
        (0.0, "equivalent", "240 common steps"),
        (0.004, "equivalent", "inside the margin of 0.01"),
        (0.03, "different", "outside the margin of 0.01"),
        (-0.03, "different", "outside the margin"),
        (0.0007 * np.arange(STEPS) / 4, "drifting", "goes on growing"),
        (0.00001 * np.arange(STEPS), "equivalent", "inside"),
        (since(120, 0.04), "different", "hand-over to gpu after step 120"),
        (since(170, 0.04), "different", "after step 17"),
    ],
    ids=["equal", "small", "above", "below", "drift", "slow", "handover", "elsewhere"],
)
def test_verdicts_on_correlated_noise(difference: Any, expected: str, said: str, seed: int) -> None:
    other = replace(run(difference + noise(seed)), handovers=((60, "cpu"), (120, "gpu"), (180, "cpu")))
    found = compare(run(), other)
    assert found.verdict == expected, found.why
    assert said in found.why
    assert found.equal == (expected == "equivalent")
    assert [handover.step for handover in found.handovers] == [60, 120, 180]
    json.dumps(found.plain(), allow_nan=False)


def test_noise_that_training_amplifies_is_no_drift() -> None:
    """From the last bit to its full size in a third of the run, as rounding does."""
    grown = np.minimum(1.0, np.exp(-12 * (1 - np.arange(600) / 200)))
    for seed in range(5):
        found = verdict(noise(seed, 600, sd=0.005) * grown, 600, handovers=(150, 300, 450))
        assert found.verdict == "equivalent", found.why
        assert found.loss is not None
        assert found.loss.late > 50 * found.loss.early


def test_a_short_or_noisy_run_does_not_tell() -> None:
    found = verdict(noise(1, 40), 40)
    assert found.verdict == "undecided"
    assert "40 common steps are too few to tell: 64 are needed" in found.why
    assert found.loss is None
    assert verdict(noise(2, sd=0.2)).verdict == "undecided"
    assert verdict(noise(2, sd=0.2), margin=0.5).verdict == "equivalent"
    assert verdict(0.0, 10).verdict == "identical"


def test_only_common_steps_count() -> None:
    a = run(steps=200)
    b = run(noise(4, 300), steps=300)
    b = replace(b, steps=b.steps[50:], loss=b.loss[50:], norm=b.norm[50:])
    found = compare(a, b)
    assert (found.steps, found.first, found.last, found.verdict) == (150, 51, 200, "equivalent")
    with pytest.raises(ConfigError, match=r"no step in common \(they have 1 to 30 and 51 to 300\)"):
        compare(run(steps=30), b)


@pytest.mark.parametrize("sd", [0.0, 1e-6, 0.004])
@pytest.mark.parametrize("size", [3.1, -0.2])
def test_one_step_that_leaps_is_found_though_the_mean_hides_it(sd: float, size: float) -> None:
    """A microbatch that was dropped once had been "undecided", beside a repeat that is equal bit by bit."""
    for place in (0, 7, 100, STEPS - 1):
        spiked = noise(1, sd=sd)
        spiked[place] += size
        for repeats in ([], [run()]):
            found = compare(run(), run(spiked), repeats)
            assert found.verdict == "different"
            assert f"at step {place + 1} alone the difference leaps by" in found.why
            assert found.spike is not None
            assert found.spike.size == pytest.approx(size, abs=0.02)
    noisy = noise(2)
    noisy[50] += 1.1 * size
    found = compare(run(), run(spiked), [run(noisy)])
    assert found.spike is None, "a repeat leaps as far"


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 300), marks=pytest.mark.slow)], ids=["50", "250"])
def test_a_spike_is_no_step_and_no_noise(seeds: range) -> None:
    assert verdict(since(120, 0.5)).spike is None
    assert "after step 120" in verdict(since(120, 0.5)).why
    for seed in seeds:
        for correlation in (0.0, 0.5, 0.8):
            assert spike(noise(seed, 400, correlation, sd=1.0), 0.01) is None
    for seed in range(50):
        begun = np.where(np.arange(400) < 200, 0.0, noise(seed, 400, sd=0.03))
        assert spike(begun, 0.01) is None, "equal bit by bit up to a hand-over"
    assert spike(np.random.default_rng(1).standard_t(4, 1000), 0.01) is None, "nor are heavier tails"


def test_gradient_norms_alone_can_differ() -> None:
    """Adam does not notice gradients that are twice as large, and the losses say nothing."""
    found = compare(run(), run(noise(1), norm=np.exp(0.02 * noise(2, sd=1.0)) * 2))
    assert found.verdict == "different"
    assert "gradient norms differ from A's by +99.5%" in found.why
    assert compare(run(), run(noise(1), norm=1.02)).verdict == "equivalent"
    skipped = run(noise(1))
    skipped.norm[::7] = np.inf  # as fp16 logs steps it leaves out
    assert len(pair(run(), skipped).norm) == STEPS - len(range(0, STEPS, 7))
    assert compare(run(), skipped).verdict == "equivalent"


def test_a_loss_that_is_no_number_is_another_run() -> None:
    broken = run()
    broken.loss[77] = np.nan
    found = compare(run(), broken)
    assert (found.verdict, found.why) == ("different", "after step 78 the loss of one of the runs is not finite")


def test_repeats_widen_the_error_and_give_the_noise() -> None:
    """Two runs of one setting that lie 0.009 apart for good: a mean difference of 0.009 is nothing then."""
    repeat = run(0.009 + noise(5))
    alone = compare(run(), run(0.002 + noise(6)))
    found = compare(run(), run(0.002 + noise(6)), [repeat])
    assert alone.loss is not None
    assert found.loss is not None
    assert found.noise is not None
    assert found.noise.mean == pytest.approx(0.009, abs=0.001)
    assert found.loss.mean.error == pytest.approx(found.noise.mean)
    assert alone.loss.mean.error < 0.002
    assert found.noise.pairs == 1
    assert found.noise.quantile == pytest.approx(0.0155, abs=0.002)
    assert found.noise.bands[0][0] == 1
    assert found.noise.bands[-1][1] == STEPS
    assert len(compare(run(), run(noise(6)), [repeat, repeat]).noise.bands) == 20  # type: ignore[union-attr]
    wild = compare(run(), run(noise(7, sd=0.02)), [run(noise(8))])
    assert any("scatter about A's with sd 0.0" in note for note in wild.notes)
    with pytest.raises(ConfigError, match="have no step in common"):
        compare(run(), run(), [replace(repeat, steps=repeat.steps + 1000)])
    with pytest.raises(ConfigError, match="a --repeat has no step that both runs have"):
        compare(run(), replace(run(steps=9), steps=np.arange(100, 109)), [replace(repeat, steps=repeat.steps + 200)])


def test_handovers_are_asked_for_or_named() -> None:
    found = verdict(noise(3) + since(100, 0.05), handovers=(100,))
    assert "at the hand-over after step 100 the difference jumps by +0.0" in found.why
    assert found.handovers[0].jump is not None
    assert found.handovers[0].jump.p < 0.001
    for step in (0, STEPS, 9999):
        with pytest.raises(ConfigError, match=f"--handover {step} is not between"):
            verdict(noise(3), handovers=(step,))
    short = verdict(noise(3), handovers=range(20, 240, 20))
    assert all(handover.jump is None for handover in short.handovers)
    assert any("are not judged" in note for note in short.notes)
    small = verdict(noise(3, 600, sd=0.001) + 0.004 * (np.arange(600) >= 300), 600, handovers=(300,))
    assert small.verdict not in ("different", "drifting")
    assert any("jumps by +0.004" in note and "within the margin" in note for note in small.notes)


@pytest.mark.parametrize("margin", [0.0, -1.0, float("nan")])
def test_a_margin_is_above_nothing(margin: float) -> None:
    with pytest.raises(ConfigError, match="--margin"):
        verdict(0.0, margin=margin)


def rates(difference: Any, correlation: float, seeds: int = 150, sd: float = 0.01) -> Counter[str]:
    """Verdicts on as many runs; the noise of a step is as large as the margin."""
    found: Counter[str] = Counter()
    for seed in range(seeds):
        noisy = run(difference + noise(seed, correlation=correlation, sd=sd))
        found[compare(run(), noisy, handovers=(60, 120, 180)).verdict] += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_verdicts_are_wrong_as_rarely_as_declared(correlation: float) -> None:
    """ "equivalent" on the margin in at most 5 % of runs, an alarm without a difference in at most 5 %."""
    on_the_edge, none = rates(0.01, correlation), rates(0.0, correlation)
    assert on_the_edge["equivalent"] <= 8  # of 150
    assert none["different"] + none["drifting"] <= 8
    assert rates(0.0, correlation, 30, sd=0.001)["equivalent"] >= 29


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_errors_of_means_hold(correlation: float) -> None:
    """The 90 % interval of the mean misses in about 10 % of series."""
    found = [mean(noise(seed, 300, correlation, 1.0)) for seed in range(300)]
    missed = sum(not each.low < 0 < each.high for each in found) / len(found)
    assert 0.05 < missed < 0.15


def test_alarms_of_the_single_tests_are_rare() -> None:
    trends = steps = jumped = 0
    for seed in range(300):
        series = noise(1000 + seed, 400, 0.5, 1.0)
        found = change(series)
        assert found is not None
        trends += found.p_trend <= 0.05
        steps += found.p_step <= 0.05
        jumped += any(jump.p <= 0.05 for jump in jumps(series, [100, 200, 300]))
    assert max(trends, steps, jumped) <= 0.08 * 300


def test_student_and_correlation_are_right() -> None:
    for p, freedom, expected in ((0.1, 1, 6.313752), (0.1, 10, 1.812461), (0.01, 2, 9.924843), (0.001, 5, 6.868827)):
        assert t_quantile(p, freedom) == pytest.approx(expected, rel=1e-6)
        assert t_tail(expected, freedom) == pytest.approx(p, rel=1e-5)
    assert correlation_time(noise(0, 4000, 0.0)) < 1.3
    assert correlation_time(noise(0, 4000, 0.8)) == pytest.approx(9, rel=0.35)  # (1 + c) / (1 - c)
    assert correlation_time(np.zeros(100)) == 1
    flat = mean(np.zeros(100))
    assert (flat.mean, flat.low, flat.high) == (0, 0, 0)
    assert flat.inside(1e-9)


# Folders


def write(
    folder: Path, loss: Sequence[float] | np.ndarray, order: Order | None = None, data: bytes = b"some row"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"about": {"steps": len(loss)}}]
    for step, value in enumerate(loss, 1):
        lines.append({"step": step, "tokens": 8 * step, "loss": float(value), "grad_norm": 1.0})
        if step % 10 == 0:
            lines.append({"step": step, "eval_loss": 3.0, "perplexity": 20.0})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if order is not None:
        receipts = ReceiptLog(folder, order)
        for step in range(len(loss)):
            receipts.add(order.batch(step), data)
        receipts.close()
    return folder


def test_a_folder_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [5.0, 4.0, 3.0])
    legs = {"legs": [{"name": "cpu", "from": 0, "to": 1}, {"name": "gpu", "from": 1, "to": 3, "more": True}]}
    (folder / "relay.json").write_text(json.dumps(legs))
    with (folder / "log.jsonl").open("a") as stream:
        stream.write('{"step": 2, "loss": 4.5}\n{"step": 4, "lo')  # taken again without a norm; cut by a crash
    found = read_run(folder)
    assert found.steps.tolist() == [1, 2, 3]
    assert found.loss.tolist() == [5.0, 4.5, 3.0]
    assert np.isnan(found.norm[1])
    assert (found.probes, found.order, found.handovers) == ((), None, ((1, "gpu"),))


def test_a_null_in_a_log_is_a_loss_that_was_not_finite(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [5.0, 4.0, 3.0])
    with (folder / "log.jsonl").open("a") as stream:
        stream.write('{"step": 4, "loss": null, "grad_norm": null}\n')
    found = read_run(folder)
    assert found.steps.tolist() == [1, 2, 3, 4]
    assert np.isnan(found.loss[3])
    assert np.isnan(found.norm[3])


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        settings = {"run_name": name, "optimizer": {"name": "adamw", "lr": rate}, "save_folder": name}
        (write(tmp_path / name, [3.0] * 70) / "config.json").write_text(json.dumps(settings))
    found = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert found.settings == (("optimizer.lr", 0.1, 0.2),)
    assert compare(read_run(tmp_path / "a"), read_run(write(tmp_path / "c", [3.0] * 70))).settings == ()


def test_it_reads_the_files_that_training_writes() -> None:
    pytest.importorskip("torch", reason="training is torch")
    from roofline.train.report import log
    from roofline.train.run import probe

    assert (recorded_run.LOG, recorded_run.PROBES) == (log.LOG, probe.PROBES)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("log.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "lo\n', "line 2 is damaged"),
        ("log.jsonl", '{"step": "one", "loss": 2}\n', "line 1 is damaged: .*whole number"),
        ("log.jsonl", '{"step": 1, "loss": true}\n', "line 1 is damaged: .*not a number"),
        ("log.jsonl", '{"loss": 1}\n', "line 1 is damaged: KeyError"),
        ("log.jsonl", "7\n", "line 1 is damaged"),
        ("log.jsonl", '{"about": {}}\n', "has no step yet"),
        ("probes.jsonl", '{"step": 0}\n', "probes.jsonl: line 1 is damaged: KeyError"),
        ("probes.jsonl", "[]\n", "probes.jsonl: line 1 is damaged"),
        ("relay.json", '{"legs": [{}, {"from": 1}]}', r"relay\.json is damaged"),
        ("order.json", "{", "is damaged"),
        ("config.json", "{", r"config\.json is damaged"),
        ("config.json", "[]", r"config\.json is damaged: it holds no keys"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = write(tmp_path / "a", [5.0, 4.0])
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_run(folder)
    with pytest.raises(ConfigError, match=r"holds no log\.jsonl: name the folder of a training run"):
        read_run(tmp_path / "nothing")
    (folder / "log.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        read_run(folder)


def test_other_samples_are_another_run(tmp_path: Path) -> None:
    order, other = (Order((Stream((64,)),), 4, seed) for seed in (1, 2))
    loss = 3 + noise(0, 80)
    a, b, c, d = (
        read_run(write(tmp_path / name, values, which))
        for name, values, which in (
            ("a", loss, order),
            ("b", loss, order),
            ("c", loss, other),
            ("d", loss + noise(1, 80, sd=0.001), order),
        )
    )
    assert compare(a, b).samples is not None
    assert "they read the same samples in the same order" in compare(a, b).why
    found = compare(a, c)
    assert (found.verdict, found.samples) == ("different", SampleAgreement(80, 1, False, 0))
    assert "from step 1 on the runs read other samples" in found.why
    assert compare(a, d).verdict == "equivalent"
    for name, data, said in (
        ("e", b"8 others", "from step 1 on the runs read another data set"),
        ("f", b"", "all losses and gradient norms of the 80 common steps are equal bit by bit"),
    ):
        found = compare(a, read_run(write(tmp_path / name, loss, order, data)))
        assert found.why.startswith(said), "the data set is told from the model, and nothing is said of older receipts"
    assert "read the same samples" not in found.why
    assert any("bind the numbers of the samples, not what their rows held" in note for note in found.notes)
    with pytest.raises(ConfigError, match="is no repeat of"):
        compare(a, b, [c])


# Layers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch = pytest.importorskip("torch", reason="training is torch")
    from tests.train.probe_runs import write_rows

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield write_rows(tmp_path_factory.mktemp("rows"))
    torch.set_num_threads(before)


def scaled(name: str, by: float) -> Callable[[Any], None]:
    """A parameter of the model times `by`."""

    def plant(model: Any) -> None:
        import torch

        with torch.no_grad():
            next(tensor for _, param, tensor in model.canonical() if param.name == name).mul_(by)

    return plant


def louder(layer: int, by: float) -> Callable[[Any], None]:
    """What a layer adds to the stream, times `by`: nothing that a checkpoint would show."""

    def plant(model: Any) -> None:
        model.blocks[layer].register_forward_hook(lambda _, args, out: args[0] + (out - args[0]) * by)

    return plant


def wrong_backward(layer: int, by: float) -> Callable[[Any], None]:
    """The gradient that a layer hands back, times `by`; forward all is well."""

    def plant(model: Any) -> None:
        def hook(_: Any, args: Any) -> Any:
            held = args[0] * by
            return ((args[0] - held).detach() + held, *args[1:])

        model.blocks[layer].register_forward_pre_hook(hook)

    return plant


BEGINS = {"max_duration": "1ba", "save_interval": "0ba"}


@pytest.fixture(scope="module")
def honest(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    """Runs without a fault."""
    from tests.train.probe_runs import train

    place = tmp_path_factory.mktemp("honest")

    class Trained(dict[str, RecordedRun]):
        """Each run is trained when a test first asks for it."""

        def __missing__(self, name: str) -> RecordedRun:
            self[name] = read_run(train(data, place / name, **BEGINS, **settings[name]))
            return self[name]

    settings: dict[str, dict[str, Any]] = {
        "fp32": {},
        "fp32 sharded": {"fsdp_config": {}, "device_train_microbatch_size": 2},
        "fp32 compiled": {"compile_config": {"backend": "aot_eager"}, "device_train_microbatch_size": 3},
        "bf16": {"precision": "amp_bf16"},
        "bf16 again": {"precision": "amp_bf16", "device_train_microbatch_size": 3},
        "bf16 sharded": {"precision": "amp_bf16", "fsdp_config": {"mixed_precision": "PURE"}},
        "fp16": {"precision": "amp_fp16"},
    }
    return Trained()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("fp32", "fp32 sharded"),
        ("fp32", "fp32 compiled"),
        ("bf16", "bf16 again"),
        ("bf16", "bf16 sharded"),
        ("fp32", "bf16"),
        ("fp32", "bf16 sharded"),
        ("fp32", "fp16"),
        ("bf16", "fp16"),
    ],
)
def test_honest_runs_name_no_layer(honest: dict[str, RecordedRun], a: str, b: str) -> None:
    for one, two in ((a, b), (b, a)):
        found = compare(honest[one], honest[two])
        assert found.layers is not None
        assert (found.layers.step, found.layers.judged) == (0, True)
        assert (found.layers.activation, found.layers.gradient) == (None, None), found.why
        assert found.verdict in ("undecided", "identical")  # there is one step


@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp_bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (louder(2, 1.02), "layer 2"),
        pytest.param(scaled("layers.2.mlp.down.weight", 1.02), "layer 2", marks=pytest.mark.slow),
        pytest.param(scaled("layers.2.mlp_norm.weight", 1.02), "layer 2", marks=pytest.mark.slow),
        pytest.param(scaled("layers.1.attn_norm.weight", 1.02), "layer 1", marks=pytest.mark.slow),
        pytest.param(scaled("layers.3.attn.qkv.weight", 1.05), "layer 3", marks=pytest.mark.slow),
        (scaled("final_norm.weight", 1.02), "logits"),
        (scaled("embed.weight", 1.02), "embed"),
    ],
    ids=["scale", "down", "mlp-norm", "attention-norm", "qkv", "final-norm", "embed"],
)
def test_a_planted_scale_is_found_and_named(
    data: Path, honest: dict[str, RecordedRun], tmp_path: Path, precision: str, plant: Callable[[Any], None], named: str
) -> None:
    from tests.train.probe_runs import train

    options = {"precision": precision, "device_train_microbatch_size": 2, **BEGINS}
    faulty = read_run(train(data, tmp_path / "faulty", plant, **options))
    found = compare(honest["fp32" if precision == "fp32" else "bf16"], faulty)
    assert found.layers is not None
    assert found.layers.activation == named
    assert found.verdict == "different"
    assert found.why.startswith(f"at step 0, {named} is the first tensor to differ")
    json.dumps(found.plain(), allow_nan=False)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("amp_bf16", marks=pytest.mark.slow)])
def test_a_wrong_backward_pass_is_found_from_the_loss_backward(
    data: Path, honest: dict[str, RecordedRun], tmp_path: Path, precision: str
) -> None:
    from tests.train.probe_runs import train

    options = {"precision": precision, "device_train_microbatch_size": 2, **BEGINS}
    faulty = read_run(train(data, tmp_path / "faulty", wrong_backward(2, 1.1), **options))
    found = compare(honest["fp32" if precision == "fp32" else "bf16"], faulty)
    assert found.layers is not None
    assert (found.layers.activation, found.layers.gradient) == (None, "layer 1")
    assert "layer 1 has the first gradient to differ" in found.why


@pytest.mark.slow
def test_a_fault_hides_in_losses_but_not_in_probes(data: Path, tmp_path: Path) -> None:
    """The losses of the two are equivalent, and the verdict names the layer all the same."""
    a, b = (
        replace(run(noise(1) if plant else 0.0), probes=read_run(_begun(data, tmp_path / name, plant)).probes)
        for name, plant in (("a", None), ("b", louder(2, 1.02)))
    )
    assert compare(replace(a, probes=()), replace(b, probes=())).verdict == "equivalent"
    found = compare(a, b)
    assert found.verdict == "different"
    assert "layer 2" in found.why


def _begun(data: Path, folder: Path, plant: Callable[[Any], None] | None = None, **changes: Any) -> Path:
    from tests.train.probe_runs import train

    return train(data, folder, plant, **BEGINS, **changes)


@pytest.mark.slow
def test_later_probes_are_judged_by_repeats_or_not_at_all(data: Path, tmp_path: Path) -> None:
    """At step 2 weights have grown apart; at a hand-over they are the same."""
    from tests.train.probe_runs import train

    whole = {"max_duration": "4ba", "precision": "amp_bf16"}
    a = read_run(train(data, tmp_path / "a", **whole))
    runs = [
        read_run(train(data, tmp_path / f"b{rows}", None, device_train_microbatch_size=rows, **whole))
        for rows in (1, 2, 3)
    ]
    late = [replace(each, probes=each.probes[1:]) for each in (a, *runs)]
    late = [replace(each, probes=(each.probes[0] | {"step": 1}, *each.probes)) for each in late]
    late = [
        replace(each, probes=(each.probes[0] | {"step": number}, *each.probes[1:])) for number, each in enumerate(late)
    ]
    found = compare(late[0], late[1])
    assert found.layers is not None
    assert (found.layers.step, found.layers.judged, found.layers.activation) == (2, False, None)
    assert any("not judged without --repeat" in note for note in found.notes)
    found = compare(late[0], late[1], late[2:])
    assert found.layers is not None
    assert (found.layers.judged, found.layers.by_repeats, found.layers.activation) == (True, True, None)
    other = read_run(train(data, tmp_path / "c", louder(2, 1.3), **whole))
    other = replace(other, probes=({**other.probes[0], "step": 9}, *other.probes[1:]))
    found = compare(late[0], other, late[2:])
    assert found.layers is not None
    assert found.layers.activation is not None


def test_a_run_that_goes_on_with_a_fault_is_found_in_itself(data: Path, tmp_path: Path) -> None:
    from tests.train.probe_runs import train

    folder = train(data, tmp_path / "a")
    at_two = {"load_path": str(folder / "checkpoints" / "step-00000002"), "save_overwrite": True}
    found = compare(read_run(folder), read_run(train(data, folder, **at_two)))
    assert [joint.layers.activation for joint in found.joints] == [None]
    found = compare(read_run(folder), read_run(train(data, folder, louder(1, 1.02), **at_two)))
    assert found.joints[-1].layers.activation == "layer 1"
    assert "where a went on at step 2, layer 1 is the first tensor to differ" in found.why


@pytest.mark.slow
def test_probes_that_cannot_be_compared(data: Path, honest: dict[str, RecordedRun], tmp_path: Path) -> None:
    smaller = read_run(_begun(data, tmp_path / "small", model__n_layers=2))
    found = compare(honest["fp32"], smaller)
    assert (found.verdict, found.layers) == ("different", None)
    assert "their models have other shapes" in found.why
    others = tuple({**line, "rows": [7, 8, 9, 10]} for line in honest["fp32"].probes)
    found = compare(replace(honest["fp32"], order=None), replace(honest["fp32"], probes=others, norm=np.zeros(1)))
    assert found.verdict == "different"
    assert "of other rows" in found.why
    without = compare(honest["fp32"], replace(honest["fp32 sharded"], probes=()))
    assert any("layers were not compared" in note for note in without.notes)
