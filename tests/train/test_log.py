"""The log of a run: which time its speeds are of."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("torch", reason="training is torch")

from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.report import log as log_module  # noqa: E402
from roofline.train.report.log import RunLog  # noqa: E402
from tests.train.small import config  # noqa: E402


def test_the_time_before_a_pause_is_not_in_the_speed_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: now)
    log = RunLog(tmp_path, World(rank=1), config(tmp_path, tmp_path), None)
    log.open(0, 0)
    now = 2.0
    assert log.step(1, 100)["tokens_per_s"] == 50.0
    now = 10.0
    log.evaluation(None, 1, 1.0, 10, 8.0, {})
    now = 11.0
    assert log.step(2, 200)["tokens_per_s"] == 100.0, "of one second, not of eleven"
    now = 13.0
    assert log.step(3, 300)["tokens_per_s"] == pytest.approx(200 / 3)


def test_a_speed_is_of_the_steps_of_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 1.0, 3.0, 7.0, 15.0))  # the steps take 1, 2, 4 and 8 seconds
    monkeypatch.setattr(log_module.time, "perf_counter", lambda: next(times))
    monitored = config(tmp_path, tmp_path, callbacks={"speed_monitor": {"window_size": 2}})
    log = RunLog(tmp_path, World(rank=1), monitored, None)
    log.open(0, 0)
    speeds = [log.step(step, 100 * step)["tokens_per_s"] for step in range(1, 5)]
    assert speeds == [pytest.approx(100 / 1), pytest.approx(200 / 3), pytest.approx(200 / 6), pytest.approx(200 / 12)]
