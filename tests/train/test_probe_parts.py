"""How probes share rows and passes among ranks, and what they make of sums: with a run that the tests make up."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.models.spec import Param  # noqa: E402
from roofline.train.data.order import Order, Stream  # noqa: E402
from roofline.train.data.row_arrays import RowArrays  # noqa: E402
from roofline.train.model import tensor_parallel  # noqa: E402
from roofline.train.model.modules import IGNORED  # noqa: E402
from roofline.train.model.tensor_parallel import TensorRanks  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run import probe  # noqa: E402
from roofline.train.run.probe import RunProbe  # noqa: E402
from roofline.train.run.projection import SIZE, sums  # noqa: E402

LENGTH = 5
RATE = {"precision": "fp32", "compile_config": None, "device_train_microbatch_size": 2}


class Source:
    """Rows that consist of their number."""

    def __init__(self, documents: bool) -> None:
        self.documents = documents

    def rows(self, numbers: np.ndarray) -> RowArrays:
        tokens = np.tile(np.asarray(numbers)[:, None], (1, LENGTH)).astype(np.int64)
        return RowArrays(tokens, tokens + 100 if self.documents else None)


def made(folder: Path, world: World | None = None, batch: int = 9, size: int | None = 2, **options: Any) -> RunProbe:
    """The probe of a rank. size: rows of a microbatch, None where `auto` has not found it."""
    documents = options.pop("documents", False)
    run: Any = SimpleNamespace(
        world=world or World(),
        order=Order((Stream((100,), shuffle=False),), batch, 0),
        source=Source(documents),
        folder=folder,
        progress=SimpleNamespace(step=options.pop("step", 0)),
        gradients=SimpleNamespace(size=size, scaler=options.pop("scaler", None)),
        config=SimpleNamespace(**RATE | options),
    )
    return RunProbe(run)


@pytest.mark.parametrize(
    ("world", "batch", "parts"),
    [
        (1, 9, [[0, 1, 2, 3]]),
        (1, 3, [[0, 1, 2]]),
        (2, 9, [[0, 1], [2, 3]]),
        (3, 9, [[0], [1], [2, 3]]),
        (8, 9, [[], [0], [], [1], [], [2], [], [3]]),
    ],
)
def test_ranks_share_the_first_four_rows(tmp_path: Path, world: int, batch: int, parts: list[list[int]]) -> None:
    for rank, part in enumerate(parts):
        each = made(tmp_path, World(rank, world), batch)
        assert (each.rows.tolist(), each.places.tolist()) == (list(range(min(4, batch))), part)
        assert each.tokens[:, 0].tolist() == part


def test_ranks_that_share_matrices_have_the_same_rows(tmp_path: Path) -> None:
    """Of four ranks in two pairs the first two have one half of the rows, and the passes of two ranks."""
    for rank, expected in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]]):
        each = made(tmp_path, World(rank, 4, tensor=TensorRanks(rank % 2, 2)), size=1)
        assert each.places.tolist() == expected
        assert [place for place, *_ in chunks(each)] == expected
        assert made(tmp_path, World(rank, 4, tensor=TensorRanks(rank % 2, 2)), size=9)._pass() == (2, False)


def test_gradients_of_divided_matrices_add_up_to_those_of_full_ones() -> None:
    """Two ranks have halves of three parameters, and all of a fourth; their sums are divided by two (`World.sum`)."""
    params = [
        Param("embed", (6, 4), "replicate"),
        Param("layers.0.a", (8, 4), "column", parts=(4, 2, 2)),
        Param("layers.0.b", (3, 8), "row"),
        Param("layers.0.c", (8,), "column"),
    ]
    generator = torch.Generator().manual_seed(2)
    full = [torch.randn(param.shape, generator=generator) for param in params]

    def gradients(ranks: TensorRanks) -> dict[str, probe.Sums]:
        pairs = zip(params, full, strict=True)
        tensors = [SimpleNamespace(grad=tensor_parallel.part(param, ranks).cut(grad)) for param, grad in pairs]
        rows = [(None, *pair) for pair in zip(params, tensors, strict=True)]
        model = SimpleNamespace(canonical=lambda: rows, blocks=[None], ranks=ranks)
        run: Any = SimpleNamespace(model=model, world=World(ranks.rank, ranks.size, tensor=ranks))
        return probe._gradients(run)

    alone, halves = gradients(TensorRanks()), [gradients(TensorRanks(rank, 2)) for rank in range(2)]
    for name, expected in alone.items():
        assert (halves[0][name] + halves[1][name]) / 2 == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_later_lines_of_an_earlier_attempt_are_dropped_by_rank_0(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"step": step}) + "\n" for step in (0, 2, 4))
    (tmp_path / probe.PROBES).write_text(lines)
    made(tmp_path, World(1, 2), step=2)
    assert (tmp_path / probe.PROBES).read_text() == lines
    made(tmp_path, World(0, 2), step=2)
    assert (tmp_path / probe.PROBES).read_text().count("\n") == 2


COMPILED = {"compile_config": object()}


@pytest.mark.parametrize(
    ("world", "size", "options", "expected"),
    [
        (1, 2, {}, (2, False)),
        (1, 12, {}, (4, False)),
        (2, 12, {}, (2, False)),
        (3, 12, {}, (2, False)),
        (1, 12, COMPILED, (12, True)),
        (1, 12, {"device_train_microbatch_size": "auto"}, (1, False)),
        (1, 12, {"device_train_microbatch_size": "auto"} | COMPILED, (12, True)),
        (1, None, {"device_train_microbatch_size": "auto"} | COMPILED, (1, False)),
    ],
)
def test_a_pass_is_a_microbatch_that_is_not_larger_than_a_ranks_rows(
    tmp_path: Path, world: int, size: int | None, options: dict[str, Any], expected: tuple[int, bool]
) -> None:
    assert made(tmp_path, World(0, world), size=size, **options)._pass() == expected


def chunks(each: RunProbe) -> list[tuple[int, int, list[list[list[int]]]]]:
    goals = each.tokens + 50
    return [(place, real, [array.tolist() for array in arrays]) for place, real, arrays in each._chunks(goals)]


def rows(*numbers: int, plus: int = 0) -> list[list[int]]:
    return [[number + plus] * LENGTH for number in numbers]


PAD, NOTHING = [0] * LENGTH, [IGNORED] * LENGTH


def test_every_rank_has_as_many_passes(tmp_path: Path) -> None:
    """Of three ranks the last has two of the four rows, the others one and then a row that does not count."""
    first, _, last = (chunks(made(tmp_path, World(rank, 3), size=1)) for rank in range(3))
    assert first == [(0, 1, [rows(0), rows(50)]), (0, 0, [[PAD], [NOTHING]])]
    assert last == [(2, 1, [rows(2), rows(52)]), (3, 1, [rows(3), rows(53)])]


def test_the_last_pass_is_as_long_as_its_rows_unless_it_is_compiled(tmp_path: Path) -> None:
    plain = chunks(made(tmp_path, size=3, documents=True))
    assert plain == [
        (0, 3, [rows(0, 1, 2), rows(0, 1, 2, plus=50), rows(0, 1, 2, plus=100)]),
        (3, 1, [rows(3), rows(53), rows(103)]),
    ]
    compiled = chunks(made(tmp_path, size=3, documents=True, compile_config=object()))
    assert compiled[0] == plain[0]
    assert compiled[1] == (3, 1, [[*rows(3), PAD, PAD], [*rows(53), NOTHING, NOTHING], [*rows(103), PAD, PAD]])


@pytest.mark.parametrize(
    ("finite_below", "start", "scales"),
    [(1e9, 2.0**16, [2.0**16]), (5000, 2.0**16, [2.0**16, 2.0**12]), (0, 32.0, [32.0, 2.0, 1.0]), (1e9, None, [1.0])],
)
def test_a_scale_is_lowered_until_gradients_are_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finite_below: float, start: float | None, scales: list[float]
) -> None:
    """And a probe leaves the run as it was: its gradients, and the time of its steps."""
    each = made(tmp_path, scaler=SimpleNamespace(scale=start) if start else None)
    model = torch.nn.Linear(2, 2)
    kept = [torch.ones(2, 2), None]
    model.weight.grad = kept[0]
    paused: list[None] = []
    each.run.model, each.run.log = model, SimpleNamespace(pause=lambda: paused.append(None))  # type: ignore[assignment]
    tried = []

    def measure(scale: float) -> probe.Totals:
        assert all(parameter.grad is None for parameter in model.parameters())
        model.bias.grad = torch.ones(2)
        tried.append(scale)
        own, grads = np.zeros(2 + SIZE), np.full(2 + SIZE, 4.0 if scale < finite_below else np.inf)
        activations = np.full(2 + SIZE, np.inf)  # these are what they are for every scale
        own[:2], activations[0], grads[0] = (8, 20.0), 1, 1
        return {("loss", ""): own, ("activations", "a"): activations, ("gradients", "g"): grads}

    monkeypatch.setattr(each, "_measure", measure)
    each.record()
    assert tried == scales
    assert paused == [None]
    assert [parameter.grad for parameter in model.parameters()] == kept
    (line,) = (json.loads(text) for text in (tmp_path / probe.PROBES).read_text().splitlines())
    assert (line["step"], line["rows"], line["tokens"], line["loss"]) == (0, [0, 1, 2, 3], 8, 2.5)
    assert (line["precision"], line["device"], line["processes"], line["compiled"]) == ("fp32", "cpu", 1, False)
    if finite_below:
        assert line["gradients"][0]["norm"] == 2.0 / scales[-1]


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = made(tmp_path, World(1, 2))
    each.run.model, each.run.log = torch.nn.Linear(2, 2), SimpleNamespace(pause=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(each, "_measure", lambda scale: {})
    each.record()
    assert not (tmp_path / probe.PROBES).exists()


def test_figures_are_sums_divided_by_their_units() -> None:
    """Activations by the root of their number, gradients by the scale; nine digits of each sketch."""
    loss, part = np.zeros(2 + SIZE), np.full(2 + SIZE, 1.0)
    loss[:2] = 4, 10.0
    part[:4] = 16, 36.0, 1 / 3, 1e-20
    figures = probe._figures({("loss", ""): loss, ("activations", "a"): part, ("gradients", "g"): part}, 8.0)
    assert (figures["tokens"], figures["loss"]) == (4, 2.5)
    (activation,), (gradient,) = figures["activations"], figures["gradients"]
    assert (activation["name"], activation["size"], activation["rms"]) == ("a", 16, 6 / 4)
    assert (gradient["name"], gradient["size"], gradient["norm"]) == ("g", 16, 6 / 8)
    assert len(activation["sketch"]) == len(gradient["sketch"]) == SIZE
    assert activation["sketch"][:3] == [0.0833333333, 2.5e-21, 0.25]
    assert gradient["sketch"][:3] == [0.0416666667, 1.25e-21, 0.125]
    nothing = probe._figures({("loss", ""): np.zeros(2 + SIZE), ("activations", "a"): np.zeros(2 + SIZE)}, 1.0)
    assert (nothing["loss"], nothing["activations"][0]["rms"], nothing["gradients"]) == (0.0, 0.0, [])


class Model:
    """What the watch needs of one: blocks, and logits that are the head times the stream."""

    def __init__(self, vocab: int) -> None:
        self.blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
        self.cfg = SimpleNamespace(vocab=vocab)
        self.sizes: list[int] = []
        self.skips = True

    def logits(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.sizes.append(len(x))
        return x @ weights[0]

    def head_loss(self, goals: torch.Tensor, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.parametrize(("vocab", "at_a_time"), [(1 << 21, 2), (1 << 20, 4), (1 << 24, 1)])
def test_logits_are_summed_up_in_pieces_of_4_million(vocab: int, at_a_time: int) -> None:
    model: Any = Model(vocab)
    watch = probe._Watch(model, LENGTH)
    x, weight = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.eye(3)
    original = model.head_loss
    with watch.rows(2, 1):  # one row of five tokens counts, row 2 of the probe; the loss comes in chunks of four
        for start in (0, 4):
            model.head_loss(torch.zeros(4), x[start : start + 4], weight)
        assert not model.skips, "the logits of all rows are summed up"
    assert sum(model.sizes) == 5
    assert model.sizes[0] == at_a_time
    assert (model.head_loss, model.skips) == (original, True)
    np.testing.assert_allclose(watch.sums["logits"][1:], sums("logits", x[:5], 2 * LENGTH), rtol=1e-5)
    assert watch.sums["logits"][0] == 15


def test_a_watched_pass_leaves_nothing_behind() -> None:
    model: Any = Model(8)
    watch = probe._Watch(model, LENGTH)
    x = torch.randn(2 * LENGTH, 3, generator=torch.Generator().manual_seed(1))
    with watch.rows(1, 1):
        for block in model.blocks:
            block(x)
    for block in model.blocks:
        block(x)
    for name in ("embed", "layer 0", "layer 1"):
        np.testing.assert_allclose(watch.sums[name], [15, *sums(name, x[:LENGTH], LENGTH)], rtol=1e-6)
    assert list(watch.sums) == ["embed", "layer 0", "layer 1", "logits"]
    assert math.isclose(watch.sums["layer 0"][1], float(x[:LENGTH].square().sum()), rel_tol=1e-6)


@pytest.mark.parametrize(
    ("changes", "stances"),
    [({}, []), ({"compile_config": {"backend": "eager"}, "device_train_microbatch_size": "auto"}, ["force_eager"])],
)
def test_a_pass_that_is_not_compiled_stays_so_in_a_compiled_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], stances: list[str]
) -> None:
    """Its shape is not that of a microbatch, so it would be compiled for itself; `auto` may have none yet."""
    from roofline.train.run.loop import Run
    from tests.train import small

    plain, seen = torch.compiler.set_stance, []

    def set_stance(stance: str) -> Any:
        seen.append(stance)
        return plain(stance)

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    config = small.config(small.write_rows(tmp_path / "data", 20), tmp_path / "run", **changes)
    run = Run(config, World())
    run.folder.mkdir(parents=True, exist_ok=True)
    run.log.open(0, 0)
    if changes:
        run.gradients.size = None
    RunProbe(run).record()
    run.close()
    assert seen == stances
