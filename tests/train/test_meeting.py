"""Where processes of a run meet: who did not come, who does not answer, and that nobody else is let in."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError, RooflineError, SaidElsewhere  # noqa: E402
from roofline.train.parallel import meeting  # noqa: E402
from roofline.train.parallel.meeting import Meeting  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.parallel.stopping import StopNotes  # noqa: E402
from roofline.train.run import loop  # noqa: E402
from roofline.train.run.failures import explained  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.open_sockets import open_sockets  # noqa: E402
from tests.train import small  # noqa: E402

LATE = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for send operation to complete"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.2)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_processes_that_do_not_come_are_named(tmp_path: Path) -> None:
    first, third = (Meeting(rank, 4, 0.2, tmp_path / "store") for rank in (0, 2))
    third.store.set("here/2", "")
    with pytest.raises(RooflineError, match=r"processes 1, 3 of 4 did not join within 0.2 s \(dist_timeout\): start"):
        first.join()


def test_who_has_not_come_is_said_by_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.1)
    places = [Meeting(rank, 4, 20, tmp_path / "store") for rank in range(4)]
    threads = [threading.Thread(target=place.join) for place in places[1:3]]
    with caplog.at_level("WARNING"):
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # in which the other one would say it, too
    assert caplog.messages == ["still waiting for processes 0, 3 of 4 to join"]
    assert not StopNotes(tmp_path).met
    places[0].store.set("here/0", "")
    places[3].join()
    for thread in threads:
        thread.join()
    assert StopNotes(tmp_path).met


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "WORLD_SIZE=2 in the environment .* MASTER_ADDR does not say .*: unset RANK, WORLD_SIZE"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT='' beside MASTER_ADDR=127.0.0.1 is no port"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, "MASTER_PORT='0' .* is no port"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "²"}, "MASTER_PORT='²' .* is no port"),
        ({"MASTER_ADDR": "192.0.2.77", "MASTER_PORT": "5"}, "rank 0 cannot listen on MASTER_ADDR=192.0.2.77"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Meeting(0, 2, 0.2)


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(
        RooflineError, match=r"process 1 of 2 has not reached rank 0 at MASTER_ADDR=127.0.0.1, .* 0.2 s"
    ):
        Meeting(1, 2, 0.2)


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="there is no /proc here")
def test_rank_0_listens_on_the_address_that_was_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    before = set(open_sockets(os.getpid()))
    first = Meeting(0, 2, 20)
    opened = set(open_sockets(os.getpid())) - before
    assert [(each.address, each.port) for each in opened] == [("127.0.0.1", port)]
    thread = threading.Thread(target=lambda: Meeting(1, 2, 20).join())
    thread.start()
    first.join()
    thread.join()


def said(error: str, meeting_of: Meeting, folder: Path) -> RooflineError | None:
    world = World(rank=meeting_of.rank, size=meeting_of.size, grouped=True, meeting=meeting_of)
    return explained(RuntimeError(error), small.config(folder, folder / "run", dist_timeout=20), world)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_ranks_that_hang_are_named_once(lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have waited in vain, one has lost another that did, whichever it is, and one hangs."""
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 1.0)
    places = [Meeting(rank, 4, 20, tmp_path / "store") for rank in (1, 2, 3)]
    results: dict[int, RooflineError | None] = {}

    def run(place: Meeting, text: str) -> None:
        results[place.rank] = said(text, place, tmp_path)

    texts = [LATE if place.rank != lost else "gloo: Connection closed by peer" for place in places]
    threads = [threading.Thread(target=run, args=pair) for pair in zip(places, texts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    speaker, listener = sorted({1, 2, 3} - {lost})
    assert str(results[speaker]).startswith("process 0 of 4 has not answered for 20 s (dist_timeout): stopped, stuck")
    assert type(results[speaker]) is RooflineError
    assert isinstance(results[listener], SaidElsewhere)
    assert isinstance(results[lost], SaidElsewhere)


def test_a_process_that_has_ended_is_told_by_those_that_lost_it(tmp_path: Path) -> None:
    lone = Meeting(1, 3, 20, tmp_path / "store")
    result = said("gloo: Connection closed by peer", lone, tmp_path)
    assert type(result) is RooflineError
    assert str(result).startswith("another process of this run has ended")


def test_where_all_answer_nobody_is_named(tmp_path: Path) -> None:
    monkeyless = Meeting(0, 1, 20, tmp_path / "store")
    assert "raise dist_timeout" in str(said(LATE, monkeyless, tmp_path))


def test_a_store_that_does_not_answer_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Meeting(1, 3, 20, tmp_path / "store")
    monkeypatch.setattr(place, "store", None)  # asking it fails
    monkeypatch.setattr(place, "_within", lambda seconds, ask: None)
    assert place.silent() == [0]


def test_a_run_notes_for_its_launcher_how_long_it_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(meeting=Meeting(0, 1, 20, tmp_path / "store"))
    monkeypatch.setattr(loop, "join", lambda config, store: world)
    monkeypatch.setattr(loop, "_fit", lambda *parts: "trained")
    assert train(small.config(tmp_path, tmp_path / "run", stop_timeout=7), store=tmp_path / "store") == "trained"
    assert StopNotes(tmp_path).allowed == 7.0


@pytest.mark.slow
def test_a_run_notes_for_its_launcher_how_long_it_may_take_and_that_it_stops(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    notes = StopNotes(tmp_path / "launcher")
    assert (notes.allowed, notes.begun) == (15.0, False)
    data = small.write_rows(tmp_path / "data", 20)
    given = small.config(data, tmp_path / "run", max_duration="1ba", fsdp_config={}, stop_timeout=7)
    train(given, store=tmp_path / "launcher" / "store")
    assert (notes.allowed, notes.begun) == (7.0, True)


def test_two_processes_may_note_at_a_time_that_all_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, replace, others = StopNotes(tmp_path), os.replace, [os.getpid() + 1]

    def replace_after_another_process(source: str, target: str) -> None:
        if others:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda pid=others.pop(): pid)
                notes.meet()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_another_process)
    notes.meet()
    assert not others
    assert notes.met
    assert [path.name for path in tmp_path.iterdir()] == ["met"]
