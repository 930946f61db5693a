"""What a run does beside its steps, and when: evaluations, checkpoints and reports in their order, and its limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.checkpoint.checkpoint import Saver  # noqa: E402
from roofline.train.data.loader import Source  # noqa: E402
from roofline.train.memory.estimate import Memory  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report.summary import RunReport  # noqa: E402
from roofline.train.run import evaluation, loop  # noqa: E402
from roofline.train.run.loop import Run, train  # noqa: E402
from roofline.train.run.progress import Finished  # noqa: E402
from tests.train.small import LENGTH, VOCAB, config, write_rows  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 60)


@contextmanager
def running(data: Path, folder: Path, **changes: Any) -> Iterator[Run]:
    run = Run(config(data, folder, **changes), World())
    try:
        yield run
    finally:
        run.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the loop does, in its order; a step counts and computes nothing."""
    seen: list[str] = []

    def step(self: Run) -> float:
        self.progress.step += 1
        seen.append(f"step {self.progress.step}")
        return float(self.progress.step)

    def note(owner: type, name: str, word: Callable[..., str]) -> None:
        monkeypatch.setattr(owner, name, lambda self, *rest, **named: seen.append(word(*rest, **named)))

    monkeypatch.setattr(Run, "step", step)
    note(Run, "evaluate", lambda: "evaluate")
    note(Saver, "save", lambda step, *_: f"save {step}")
    note(Saver, "wait", lambda: "wait")
    note(RunReport, "write", lambda run, ended=False: "report at the end" if ended else "report")
    return seen


def test_evaluations_checkpoints_and_reports_have_their_order(data: Path, tmp_path: Path, events: list[str]) -> None:
    """What is stored in the background is there before the last report says that all is done."""
    held_out = {"eval_loader": {"dataset": {"local": str(data)}}, "eval_interval": "3ba", "eval_first": True}
    with running(data, tmp_path, **held_out, save_interval="2ba", max_duration="5ba") as run:
        finished = run.fit()
        assert events == [
            *("evaluate", "step 1", "step 2", "save 2", "report", "step 3", "evaluate", "report"),
            *("step 4", "save 4", "report", "step 5", "evaluate", "save 5", "wait", "report at the end"),
        ]
    assert (finished.steps, finished.loss, finished.status, finished.saved) == (5, 5.0, 0, None)


def test_without_intervals_there_are_only_steps(data: Path, tmp_path: Path, events: list[str]) -> None:
    held_out = {"eval_loader": {"dataset": {"local": str(data)}}}
    with running(data, tmp_path, **held_out, max_duration="2ba") as run:
        run.fit()
        assert events == ["step 1", "step 2", "wait", "report at the end"]


def test_a_run_that_has_no_step_left_does_nothing_first(data: Path, tmp_path: Path, events: list[str]) -> None:
    held_out = {"eval_loader": {"dataset": {"local": str(data)}}, "eval_first": True}
    with running(data, tmp_path, **held_out, max_duration="2ba", probes=True) as run:
        run.stop = 0
        finished = run.fit()
        assert events == ["wait", "report at the end"]
        assert run.probe is None
    assert finished.steps == 0


@pytest.mark.parametrize(("reason_at", "steps"), [(1, 1), (None, 4)])
def test_a_callbacks_reason_ends_the_run_after_its_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason_at: int | None, steps: int
) -> None:
    with running(data, tmp_path, max_duration="4ba", save_interval="4ba") as run:
        heed = lambda line: "enough" if line["step"] == reason_at else None  # noqa: E731
        monkeypatch.setattr(run.callbacks, "step", heed)
        saved: list[int] = []
        monkeypatch.setattr(run.saver, "save", lambda step, *_: saved.append(step))
        finished = run.fit()
        assert (finished.steps, finished.reason) == (steps, "enough" if reason_at else None)
        assert saved == [steps], "its end is an end"


@pytest.mark.parametrize(("stop_after", "stop"), [(None, 8), ("3ba", 3), ("9ba", 8), ("0.5dur", 4)])
def test_a_run_stops_at_its_end_at_the_latest(data: Path, tmp_path: Path, stop_after: str | None, stop: int) -> None:
    with running(data, tmp_path, stop_after=stop_after) as run:
        assert (run.total, run.stop) == (8, stop)


def test_the_first_line_describes_the_run(data: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    train(config(data, tmp_path, max_duration="2ba", console_log_interval="0ba"), lines.append)
    about = lines[0]["about"]
    run_shape = {"steps": 2, "step": 0, "batch_tokens": 12 * LENGTH, "processes": 1, "device": "cpu", "show_every": 1}
    assert {name: about[name] for name in run_shape} == run_shape
    with running(data, tmp_path / "b") as run:
        assert about["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    assert [line["tokens"] for line in lines[1:]] == [12 * LENGTH, 2 * 12 * LENGTH]


@pytest.mark.parametrize(("vocab", "fits"), [(VOCAB, True), (VOCAB + 1, False), (None, True)])
def test_ids_of_the_rows_are_the_models(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int | None, fits: bool
) -> None:
    monkeypatch.setattr(Source, "vocab", property(lambda _: vocab))
    if fits:
        with running(data, tmp_path) as run:
            assert run.source.vocab_limit == VOCAB
    else:
        with pytest.raises(ConfigError, match="the rows have ids up to 96, the model's vocabulary is 96"):
            Run(config(data, tmp_path), World())


@pytest.mark.parametrize("label", ["eval", "far"])
def test_a_held_out_text_without_rows_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    loader: dict[str, Any] = {"dataset": {"local": str(data)}}
    loaders = loader if label == "eval" else [loader | {"label": label}]
    monkeypatch.setattr(evaluation, "in_turn", lambda *_: iter(()))
    with running(data, tmp_path, eval_loader=loaders) as run:
        name = "^eval_loader holds" if label == "eval" else "^the eval_loader labelled .*far holds"
        with pytest.raises(ConfigError, match=f"{name} no row$"):
            run.evaluate()


def test_a_model_is_trained_again_after_an_evaluation(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path, eval_loader={"dataset": {"local": str(data)}}) as run:
        modes: list[bool] = []
        run.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
        run.log.open(0, 0)
        run.evaluate()
        assert set(modes) == {False}
        assert run.model.training
        assert run.evaluations["eval"]["step"] == 0


def test_closing_goes_on_where_one_thing_fails(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(config(data, tmp_path, eval_loader={"dataset": {"local": str(data)}}), World())
    run.begin()
    things = [run.source, run.held_out["eval"], run.log, run.receipts, run._loader, run.callbacks, run.saver]
    closed: list[int] = []

    def noted(number: int, plain: Callable[[], None]) -> Callable[[], None]:
        def close() -> None:
            plain()
            closed.append(number)
            if number == 4:
                raise ValueError("the loader")

        return close

    for number, thing in enumerate(things):
        assert thing is not None
        monkeypatch.setattr(thing, "close", noted(number, thing.close))
    with pytest.raises(ValueError, match="the loader"):
        run.close()
    assert closed == [6, 5, 4, 3, 2, 1, 0], "the last one first"


@pytest.mark.parametrize(("available", "size"), [(None, 12), (1000, 3)])
def test_rows_that_do_not_fit_are_not_tried(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int | None, size: int | None
) -> None:
    monkeypatch.setattr(loop, "affordable", lambda device, processes: available)
    monkeypatch.setattr(Memory, "rows_for", lambda self, room: 3 if room == available else 7)
    with running(data, tmp_path, device_train_microbatch_size="auto") as run:
        assert run.gradients.size == size
        assert run.gradients.predicted == (run.report.memory.predicted.total if run.report.memory.predicted else None)
    with running(data, tmp_path / "b", device_train_microbatch_size=5) as run:
        assert run.gradients.size == 5


@pytest.mark.parametrize(
    ("limit", "inherited", "is_kept"), [(None, False, True), ("4gb", False, False), (None, True, False)]
)
def test_freed_memory_is_kept_unless_it_counts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, inherited: bool, is_kept: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: done.append("kept"))
    monkeypatch.setattr(loop, "give_back_freed_memory", lambda: done.append("given back"))
    monkeypatch.setattr(loop, "room", lambda: 1 << 32 if inherited else None)
    with running(data, tmp_path, memory_limit=limit):
        assert done == ["kept" if is_kept else "given back"]


@pytest.mark.parametrize("packed", [True, False])
def test_freed_memory_is_not_kept_for_batches_of_other_widths(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    kept: list[None] = []
    monkeypatch.setattr(loop, "keep_freed_memory", lambda: kept.append(None))
    monkeypatch.setattr(loop.Run, "packs", packed)
    monkeypatch.setattr(loop.Run, "tunes", property(lambda self: True, lambda self, value: None), raising=False)
    with running(data, tmp_path):
        assert bool(kept) == packed


ELASTIC = {"virtual_shards": 2, "threads": 3}
NOTHING = ["left"]


@pytest.mark.parametrize(
    ("changes", "done"),
    [
        ({}, NOTHING),
        ({"deterministic_mode": True}, ["deterministic", *NOTHING]),
        ({"elastic": ELASTIC}, ["deterministic", "checked", "3 threads", *NOTHING]),
        ({"expandable_segments": True}, ["segments on cpu", *NOTHING]),
        ({"memory_limit": "2gb"}, ["at most 2000000000 bytes", *NOTHING]),
    ],
)
def test_the_process_is_made_ready_for_what_is_configured(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], done: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(loop, "deterministic", lambda: seen.append("deterministic"))
    monkeypatch.setattr(loop, "check", lambda config: seen.append("checked"))
    monkeypatch.setattr(loop.torch, "set_num_threads", lambda count: seen.append(f"{count} threads"))
    monkeypatch.setattr(loop, "grow_segments", lambda device: seen.append(f"segments on {device}"))
    monkeypatch.setattr(loop, "limit_memory", lambda size: seen.append(f"at most {size} bytes"))
    monkeypatch.setattr(loop, "join", lambda config, store: World())
    monkeypatch.setattr(loop, "leave", lambda world: seen.append("left"))
    monkeypatch.setattr(loop, "_fit", lambda config, world, watch, *_: SimpleNamespace(steps=1))
    assert train(config(data, tmp_path, **changes)).steps == 1
    assert seen == done


@pytest.mark.parametrize(
    ("error", "raised"), [(MemoryError(), "Lower device_train"), (RuntimeError("a shape"), "a shape")]
)
def test_a_group_is_left_whatever_ends_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: str
) -> None:
    left: list[object] = []
    monkeypatch.setattr(loop, "leave", left.append)

    def fit(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "_fit", fit)
    with pytest.raises(Exception, match=raised) as caught:
        train(config(data, tmp_path))
    assert len(left) == 1
    assert (caught.value is error) == (raised == "a shape")


@pytest.mark.parametrize(("number", "status"), [(0, 0), (15, 143), (2, 130)])
def test_the_status_of_a_run_is_a_shells(number: int, status: int) -> None:
    assert Finished(1, 2.0, {}, Path(), number).status == status
