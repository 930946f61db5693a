"""The throughput card: what a run reached, against what, and how to do it again."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.hardware.chips.products import Peak  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.train.config.read import read_config  # noqa: E402
from roofline.train.data.row_arrays import Counted  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report import cards, machine, page  # noqa: E402
from roofline.train.report import summary as report  # noqa: E402
from roofline.train.report.console import Console  # noqa: E402
from roofline.train.report.flops import CONVENTIONS, per_token  # noqa: E402
from roofline.train.run.loop import Run, train  # noqa: E402
from roofline.train.run_folder import read_lines  # noqa: E402
from tests.train.small import LENGTH, config, write_rows  # noqa: E402

ROOF = {"flops": 1e12, "measured": "the fastest matmul of 2048^3 in float32"}


@pytest.fixture(autouse=True)
def roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of this machine."""
    monkeypatch.setattr(machine, "measured_roof", lambda kind, dtype: dict(ROOF))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 50)


def test_a_run_on_a_cpu_has_no_mfu(data: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    made = config(data, tmp_path, max_duration="9ba", device_train_microbatch_size=5)
    train(made, lines.append)
    card = cards.read(str(tmp_path))
    assert (card["done"], card["devices"], card["global_batch"], card["seq_len"]) == (True, 1, 12, LENGTH)
    assert (card["microbatch"], card["grad_accum"]) == (5, 3)
    assert card["conventions"] == CONVENTIONS
    assert (card["peak"], card["no_peak"]) == (None, "a CPU's peak is not guessed")
    assert all(found["mfu"] is None and found["hfu"] is None for found in card["flops"].values())
    speed = card["speed"]
    assert (speed["steps"], speed["left_out"]["steps"]) == ([3, 9], 2)
    counted = sorted(line["seconds"] for line in lines[3:])
    assert speed["step_seconds"] == pytest.approx({"p50": counted[3], "p95": counted[6]})
    assert speed["tokens_per_s"] == pytest.approx(7 * 12 * LENGTH / sum(counted))
    assert speed["wait_share"] == pytest.approx(sum(line["wait"] for line in lines[3:]) / sum(counted))
    shape = presets.preset("mpt-125m") | {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "ffn": 128,
    }
    flops = per_token(shape | {"vocab": 96, "max_position": LENGTH}, LENGTH)
    for name, found in card["flops"].items():
        assert found["model_flops_per_token"] == flops[name].model
        assert found["tflops_per_device"] == pytest.approx(speed["tokens_per_s"] * flops[name].model / 1e12)
    assert card["roof"]["share"] == pytest.approx(speed["tokens_per_s"] * flops["matmul"].hardware / 1e12)
    assert lines[0]["about"]["share"]["name"] == "of the matmul roof"
    assert card["versions"]["torch"] == torch.__version__
    memory = read_lines(tmp_path / "log.jsonl")[-1]["memory"]
    assert memory == card["memory"]
    assert lines[0]["about"]["memory"]["predicted"] == memory["predicted"]["total"]


def test_a_peak_that_is_given_makes_mfu(data: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    monitor = {"gpu_flops_available": 2e12, "warmup": 0}
    made = config(data, tmp_path, max_duration="4ba", callbacks={"speed_monitor": monitor})
    again = {"activation_checkpointing": True}
    train(made.model_copy(update={"fsdp_config": None}), lines.append)
    card = cards.read(str(tmp_path))
    rate = card["speed"]["tokens_per_s_per_device"]
    for found in card["flops"].values():
        assert found["mfu"] == pytest.approx(rate * found["model_flops_per_token"] / 2e12)
        assert found["hfu"] == pytest.approx(rate * found["hardware_flops_per_token"] / 2e12)
    assert card["peak"]["source"] == "speed_monitor.gpu_flops_available"
    assert (card["roof"], card["no_peak"], card["speed"]["left_out"]["steps"]) == (None, None, 0)
    share = lines[0]["about"]["share"]
    assert share["name"] == "MFU"
    assert share["per_token_s"] == pytest.approx(card["flops"]["foundry"]["model_flops_per_token"] / 2e12)
    full = report.RunReport(config(data, tmp_path, fsdp_config=again), json.loads(json.dumps(_shape())), World())
    assert full.checkpointing == "full"
    assert full.flops["foundry"].hardware == pytest.approx(4 / 3 * full.flops["foundry"].model)


def _shape() -> dict[str, Any]:
    return presets.preset("mpt-125m") | {"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64}


def test_it_is_written_at_checkpoints_and_says_that_more_comes(data: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    def watch(line: dict[str, Any]) -> None:
        if line.get("step") in (4, 5, 8):
            seen.append(cards.read(str(tmp_path)) if (tmp_path / cards.CARD).exists() else None)

    train(config(data, tmp_path, max_duration="8ba", save_interval="4ba"), watch)
    assert [card and (card["done"], card["speed"]["steps"]) for card in seen] == [None, *2 * [(False, [3, 4])]]
    assert cards.read(str(tmp_path))["speed"]["steps"] == [3, 8]


def test_the_page_is_drawn_again_when_that_costs_little(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(page, "write", drawn.append)
    train(config(data, tmp_path, max_duration="10ba", save_interval="2ba"))
    assert len(drawn) > 2  # not the first and the last alone


def test_a_run_that_goes_on_counts_its_own_steps(data: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"save_interval": "1dur", "autoresume": True, "max_duration": "10ba"}
    train(config(data, tmp_path, **common, stop_after="4ba"))
    train(config(data, tmp_path, **common))
    card = cards.read(str(tmp_path))
    assert card["speed"]["steps"] == [7, 10]
    train(config(data, tmp_path, **common))  # all steps are done: the card stays
    assert cards.read(str(tmp_path)) == card


def test_its_command_does_the_same_again(data: Path, tmp_path: Path) -> None:
    made = config(data, tmp_path / "run", max_duration="2ba", eval_loader={"dataset": {"local": str(data)}})
    train(made)
    words = cards.read(str(tmp_path / "run"))["command"].split()
    assert words[:3] == ["roofline", "train", str(tmp_path / "run" / "config.json")]
    again = read_config(Path(words[2]), [words[words.index("--set") + 1]])
    assert again == made.model_copy(update={"run_folder": str(tmp_path / "run-again")})


def test_steps_are_left_out_only_while_some_stay(data: Path, tmp_path: Path) -> None:
    train(config(data, tmp_path, max_duration="1ba"))
    speed = cards.read(str(tmp_path))["speed"]
    assert (speed["steps"], speed["left_out"]["steps"]) == ([1, 1], 0)


def test_a_halved_microbatch_is_predicted_again(data: Path, tmp_path: Path) -> None:
    run = Run(config(data, tmp_path, max_duration="2ba"), World())
    assert run.report.memory.predicted is not None
    assert run.report.memory.predicted.rows == 12
    before = run.report.memory.predicted.parts["activations"]
    run.begin()
    run.gradients.size = 3
    run.step()
    run.report.write(run)
    run.close()
    assert run.report.memory.predicted.rows == 3
    assert run.report.memory.predicted.parts["activations"] < before
    assert cards.read(str(tmp_path))["microbatch"] == 3


def test_quantiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [report._quantile(values, part) for part in (0.05, 0.5, 0.95, 1.0)] == [5, 50, 95, 100]
    assert report._quantile([7.0], 0.95) == 7


class Chip:
    """An accelerator that torch does not have here."""

    def __init__(self, name: str, units: int) -> None:
        self.name, self.units = name, units

    def get_device_name(self, kind: Any) -> str:
        return self.name

    def get_device_properties(self, kind: Any) -> Any:
        return SimpleNamespace(multi_processor_count=self.units)


def test_peaks_go_by_what_torch_says_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Chip("AMD Instinct MI250", 104))
    found, why = machine.peak_of(kind, "amp_bf16", None)
    assert found is not None
    assert (found.flops, found.package, found.devices, why) == (181.05e12, "MI250", 2, None)
    assert (
        machine.peak_of(kind, "fp32", None)[1]
        == "no peak is known of 'AMD Instinct MI250' with 104 multiprocessors in fp32"
    )
    assert machine.peak_of(kind, "fp32", 1e14) == (Peak(1e14, "speed_monitor.gpu_flops_available"), None)
    assert machine.device(kind) == {"name": "AMD Instinct MI250", "kind": "cuda"}
    monkeypatch.setattr(torch, "get_device_module", lambda _: Chip("A chip of tomorrow", 1000))
    assert machine.peak_of(kind, "amp_bf16", None)[0] is None


def test_the_measured_roof_is_named_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    machine.measured_roof.cache_clear()
    before = torch.get_rng_state()
    monkeypatch.setattr(machine, "_product_seconds", lambda kind, dtype, side: 2 * side**3 / 1e12)
    found = machine.measured_roof(torch.device("cpu"), torch.bfloat16)
    assert found == {"flops": pytest.approx(1e12), "measured": "the fastest matmul of 2048^3 in bfloat16"}
    machine.measured_roof.cache_clear()
    monkeypatch.setattr(machine, "_product_seconds", lambda kind, dtype, side: 2 * side**3 / 1e9)
    assert machine.measured_roof(torch.device("cpu"), None)["measured"] == "the fastest matmul of 256^3 in float32"
    machine.measured_roof.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(machine, "ROOF_SIDE", 256)
    assert machine.measured_roof(torch.device("cpu"), None)["flops"] > 1e6
    machine.measured_roof.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def slow_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """FLOP/s that the roofs' products reach, one roof after the other; the last one stays."""
    monkeypatch.undo()
    rates, sides = [1.0], []

    def seconds(kind: torch.device, dtype: torch.dtype, side: int) -> float:
        if side == 128 and sides:
            rates[:-1] = rates[1:-1]
        sides.append(side)
        return 2 * side**3 / rates[0]

    monkeypatch.setattr(machine, "_product_seconds", seconds)
    machine.measured_roof.cache_clear()
    yield rates
    machine.measured_roof.cache_clear()


def test_a_roof_that_the_run_passed_is_measured_again(data: Path, tmp_path: Path, slow_products: list[float]) -> None:
    """Beside other programs a product of 128 had taken a hundred times as long as alone: 1,341 % were printed."""
    slow_products[:] = [1.0, 2.0, 1e12]
    train(config(data, tmp_path, max_duration="3ba"))
    roof = cards.read(str(tmp_path))["roof"]
    assert roof["flops"] == pytest.approx(1e12)
    assert 0 < roof["share"] < 1


def test_a_share_that_cannot_be_is_printed_nowhere(
    data: Path, tmp_path: Path, slow_products: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(data, tmp_path, max_duration="3ba")
    console = Console(made)
    console.end(train(made, console.show))
    assert "of the matmul roof: not known)" in capsys.readouterr().err
    card = cards.read(str(tmp_path))
    assert card["roof"]["share"] is None
    assert cards.row(card, "foundry")["Measured roof (%)"] == cards.TOO_LOW
    assert cards.TOO_LOW in (tmp_path / "run.html").read_text()
    card["roof"]["share"] = 31.91  # as older versions wrote it
    assert cards.row(card, "foundry")["Measured roof (%)"] == cards.TOO_LOW
    monitor = {"gpu_flops_available": 1e3, "warmup": 0}
    train(config(data, tmp_path / "mfu", max_duration="2ba", callbacks={"speed_monitor": monitor}))
    card = cards.read(str(tmp_path / "mfu"))
    assert card["peak"] is None
    assert "speed_monitor.gpu_flops_available), so that is not the peak of this device" in card["no_peak"]
    assert all(found["mfu"] is None and found["hfu"] is None for found in card["flops"].values())


def test_the_console_shows_speed_against_something(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(data, tmp_path, max_duration="3ba")
    console = Console(made)
    console.end(train(made, console.show))
    out, err = capsys.readouterr()
    assert "of memory predicted" in err
    assert "% of the matmul roof), 0:00:0" in err
    assert err.rstrip().endswith("% of the matmul roof)")  # the last step has nothing left
    assert " of memory (predicted " in out


def card_of(folder: Path, **changes: Any) -> dict[str, Any]:
    card = cards.read(str(folder)) | changes
    return json.loads(json.dumps(card))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measured_roof", lambda kind, dtype: dict(ROOF))
        train(config(data, folder, max_duration="3ba"))
    return folder


def test_a_row_has_llm_foundrys_columns(finished: Path) -> None:
    card = cards.read(str(finished))
    found = cards.row(card, "foundry")
    assert list(found)[:8] == [
        *("Model", "SeqLen (T)", "# Devices", "Device", "MFU", "HFU", "Model TFLOP/s/device", "MicroBatchSize")
    ]
    assert (found["MFU"], found["GlobalBatchSize (T)"], found["NumParams"]) == ("-", str(12 * LENGTH), "29056")
    assert found["Measured roof (%)"].endswith(" of the fastest matmul of 2048^3 in float32")
    assert cards.row(card, "matmul")["Model TFLOP/s/device"] != found["Model TFLOP/s/device"]


def test_a_package_of_two_devices_has_both_figures(finished: Path) -> None:
    peak = {"flops": 181.05e12, "source": "a data sheet", "package": "MI250", "devices": 2}
    card = card_of(finished, peak=peak, roof=None)
    card["speed"]["tokens_per_s_per_device"] = 1700.0
    card["flops"]["foundry"] |= {"mfu": 0.406, "hfu": 0.5413, "tflops_per_device": 73.5}
    found = cards.row(card, "foundry")
    assert (found["MFU"], found["HFU"]) == ("40.60", "54.13")
    assert found["Model TFLOP/s/device"] == "73.5 (147 a MI250)"
    assert found["Throughput (T/s/device)"] == "1700 (3400 a MI250)"
    assert found["Measured roof (%)"] == "-"


def test_cards_that_count_otherwise_are_refused(finished: Path) -> None:
    card = cards.read(str(finished))
    cards.check([card, card], ["a", "b"])
    other = card_of(finished, conventions=CONVENTIONS | {"matmul": "6 N"})
    with pytest.raises(ConfigError, match=r"a and c count FLOPs differently: 'matmul' is .* there and '6 N' here"):
        cards.check([card, card, other], ["a", "b", "c"])
    fewer = card_of(finished, conventions={"foundry": CONVENTIONS["foundry"]})
    with pytest.raises(ConfigError, match=r"'matmul' is '6 x linear layers .*' there and None here"):
        cards.check([card, fewer], ["a", "b"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no card; a run writes one at its checkpoints and at its end"),
        ("{", "is no card of a run"),
        ("[1]", "is no card of a run"),
        ("{}", "is no card of a run: 'version'"),
        ('{"version": 99}', "a card of version 99, this is version 1: run it again"),
    ],
)
def test_what_is_no_card_is_said(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / cards.CARD).write_text(text)
    with pytest.raises(ConfigError, match=said):
        cards.read(str(tmp_path))


def speeds(data: Path, folder: Path, seconds: list[float], world: int = 1, **monitor: Any) -> dict[str, Any]:
    """The card's speeds of a run of 12 rows a step that goes on behind step 100, a tenth of each step spent waiting."""
    made = config(data, folder, callbacks={"speed_monitor": monitor}, global_train_batch_size=12)
    found = report.RunReport(made, _shape(), World(size=world))
    for each in seconds:
        found.step(each, each / 10, Counted(12 * LENGTH, 12 * LENGTH, 12 * LENGTH))
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=100 + len(seconds)))
    return found._speed(run)


def test_speeds_are_of_the_steps_behind_the_first(data: Path, tmp_path: Path) -> None:
    seconds = [50.0, 40.0, *(float(i) for i in range(1, 21))]
    found = speeds(data, tmp_path, seconds, world=4)
    assert found["tokens_per_s"] == pytest.approx(20 * 12 * LENGTH / 210)
    assert found["tokens_per_s_per_device"] == pytest.approx(20 * 12 * LENGTH / 210 / 4)
    assert found["rows_per_s"] == pytest.approx(20 * 12 / 210)
    assert found["step_seconds"] == {"p50": 10.5, "p95": 19.0}
    assert found["wait_share"] == pytest.approx(0.1)
    assert (found["steps"], found["left_out"]["steps"]) == ([103, 122], 2)
    assert found["elsewhere_share"] == 0.0, "no more time was counted than went by"
    for warmup, steps in ((0, [101, 104]), (1, [102, 104]), (3, [104, 104]), (9, [104, 104])):
        assert speeds(data, tmp_path, [4.0, 3.0, 2.0, 1.0], warmup=warmup)["steps"] == steps
    assert speeds(data, tmp_path, [1.0], warmup=0)["elsewhere_share"] is None


def test_a_changed_model_is_not_called_by_its_name_alone(data: Path, tmp_path: Path) -> None:
    plain = config(data, tmp_path)
    changed = plain.model_copy(update={"model": plain.model.model_copy(update={"config_overrides": {"n_heads": 2}})})
    names = [report.RunReport(each, _shape(), World())._name() for each in (plain, changed)]
    assert names == ["mpt_causal_lm", "mpt_causal_lm (changed)"]


@pytest.mark.parametrize("processes", [1, 4])
def test_the_share_is_of_all_devices_together(data: Path, tmp_path: Path, processes: int) -> None:
    made = config(data, tmp_path)
    found = report.RunReport(made, _shape(), World(size=processes))
    found.roof = dict(ROOF)
    assert found._share()["per_token_s"] == pytest.approx(found.flops["matmul"].hardware / (processes * 1e12))
    found.peak = Peak(2.0, "a table")
    assert found._share()["per_token_s"] == pytest.approx(found.flops["foundry"].model / (processes * 2.0))


def test_shares_above_what_can_be_are_left_out(data: Path, tmp_path: Path) -> None:
    found = report.RunReport(config(data, tmp_path), _shape(), World())
    most = max(flops.hardware for flops in found.flops.values())
    found.peak, found.roof = (
        Peak(1e6 * most, "a table"),
        {"flops": 1e6 * found.flops["matmul"].hardware, "measured": "m"},
    )
    for rate, is_known in ((1e6 * report.TOLERANCE * 0.999, True), (1e6 * report.TOLERANCE * 1.001, False)):
        shares = found._shares(rate)
        assert (shares["peak"] is not None) == is_known
        assert (shares["roof"]["share"] is not None) == is_known
        assert ("so that is not the peak" in str(shares["no_peak"])) != is_known
    assert found._shares(5e5)["roof"]["share"] == pytest.approx(0.5)
