"""The supervisor over stub replicas and the real HAProxy: restarts, rolls, scaling, and what is left when it ends."""

import os
import signal
import time

import pytest

from roofline.common.errors import ConfigError, RooflineError
from roofline.deploy.supervisor.slot import pause_before
from tests.deploy.conftest import is_alive
from tests.deploy.load import ask, load_on

STREAM = {"prompt": "a", "max_tokens": 40, "stream": True}


@pytest.mark.slow
def test_requests_are_shared_and_status_tells_of_all(start_fleet):
    fleet = start_fleet("small", "--replicas=2")
    fleet.wait_ready(2)
    with load_on(fleet.address) as load:
        load.wait_for(40)
    assert load.failed == []
    assert set(load.by_replica()) == {"r1", "r2"}
    fleet.eventually(
        lambda: sum((r["figures"] or {}).get("served", 0) for r in fleet.status()["replicas"]) == len(load.outcomes)
    )
    status = fleet.status()
    assert (status["wanted"], status["model"], status["balance"]) == (2, "small", "leastconn")
    assert [replica["restarts"] for replica in status["replicas"]] == [0, 0]


def test_a_replica_that_is_killed_costs_its_open_streams_alone(start_fleet):
    fleet = start_fleet("small?gap=0.02", "--replicas=2")
    fleet.wait_ready(2)
    with load_on(fleet.address, lambda number: {**STREAM, "max_tokens": 5}) as load:
        load.wait_for(8)
        before = fleet.replica("r1")["pid"]
        os.kill(before, signal.SIGKILL)
        fleet.eventually(lambda: fleet.replica("r1")["state"] == "ready" and fleet.replica("r1")["pid"] != before)
        load.wait_for(20)
    assert len(load.failed) <= 4, load.failed  # one of each worker
    assert all("IncompleteRead" in error or "without [DONE]" in error for error in load.failed), load.failed
    assert fleet.replica("r1")["restarts"] == 1
    assert load.outcomes[-1].error is None
    assert {outcome.replica for outcome in load.outcomes[-8:]} == {"r1", "r2"}  # it is in the rotation again


@pytest.mark.slow
def test_requests_wait_for_the_only_replica_that_starts_again(start_fleet):
    fleet = start_fleet("small?start=0.3", "--replicas=1")
    fleet.wait_ready(1)
    with load_on(fleet.address) as load:
        load.wait_for(4)
        os.kill(fleet.replica("r1")["pid"], signal.SIGKILL)
        load.wait_for(20)
    assert load.failed == []


@pytest.mark.slow
def test_a_roll_changes_the_model_and_no_request_fails(start_fleet):
    fleet = start_fleet("one?gap=0.01", "--replicas=2")
    fleet.wait_ready(2)
    before = [replica["pid"] for replica in fleet.status()["replicas"]]
    with load_on(fleet.address, lambda number: {**STREAM, "max_tokens": 10}) as load:
        load.wait_for(8)
        fleet.send(command="roll", model="two?gap=0.01")
        load.wait_for(8)
    assert load.failed == []
    models = [{event["model"] for event in outcome.events} for outcome in load.outcomes]
    assert all(len(names) == 1 for names in models)  # an answer is of one model
    assert (models[0], models[-1]) == ({"one"}, {"two"})
    assert not set(before) & {replica["pid"] for replica in fleet.status()["replicas"]}
    assert not any(is_alive(pid) for pid in before)
    assert fleet.status()["model"] == "two?gap=0.01"


def test_a_model_that_does_not_start_leaves_the_old_one(start_fleet):
    fleet = start_fleet("one", "--replicas=2")
    fleet.wait_ready(2)
    before = [replica["pid"] for replica in fleet.status()["replicas"]]
    with load_on(fleet.address) as load:
        with pytest.raises(RooflineError, match=r"(?s)did not become ready.*no such model"):
            fleet.send(command="roll", model="two?fail=no such model")
        load.wait_for(8)
    assert load.failed == []
    assert [replica["pid"] for replica in fleet.status()["replicas"]] == before
    assert ask(fleet.address, {"prompt": "a"}).events[0]["model"] == "one"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_where_memory_is_short_the_old_server_ends_first_and_no_request_fails(start_fleet, replicas):
    fleet = start_fleet("one?gap=0.01", f"--replicas={replicas}", STUB_DRAIN_FIRST="1")
    fleet.wait_ready(replicas)
    before = [replica["pid"] for replica in fleet.status()["replicas"]]
    with load_on(fleet.address, lambda number: {**STREAM, "max_tokens": 10}) as load:
        load.wait_for(8)
        fleet.send(command="roll", model="two?gap=0.01")
        load.wait_for(8)
        with pytest.raises(RooflineError, match="no such model"):
            fleet.send(command="roll", model="three?fail=no such model")
        fleet.wait_ready(replicas)
        load.wait_for(8)
    assert load.failed == []
    assert load.outcomes[-1].events[0]["model"] == "two"
    assert not any(is_alive(pid) for pid in before)


@pytest.mark.slow
def test_a_roll_that_fails_in_its_middle_is_undone(start_fleet):
    fleet = start_fleet("one", "--replicas=2")
    fleet.wait_ready(2)
    with load_on(fleet.address) as load:
        with pytest.raises(RooflineError, match="no such model"):
            fleet.send(command="roll", model="two?fail=no such model&on=r2")
        fleet.wait_ready(2)
        count = len(load.outcomes)
        load.wait_for(16)
    assert load.failed == []
    assert "two" in {outcome.events[0]["model"] for outcome in load.outcomes}  # it was there for a moment
    assert {outcome.events[0]["model"] for outcome in load.outcomes[count + 4 :]} == {"one"}
    assert {replica["model"] for replica in fleet.status()["replicas"]} == {"one"}


@pytest.mark.slow
def test_replicas_enter_and_leave(start_fleet):
    fleet = start_fleet("small?gap=0.01", "--replicas=1", "--max-replicas=3")
    fleet.wait_ready(1)
    with load_on(fleet.address, lambda number: {**STREAM, "max_tokens": 5}, workers=6) as load:
        fleet.send(command="scale", replicas=3)
        fleet.wait_ready(3)
        load.wait_for(30)
        assert {outcome.replica for outcome in load.outcomes[-12:]} == {"r1", "r2", "r3"}
        fleet.send(command="scale", replicas=1)
        count = len(load.outcomes)
        load.wait_for(20)
    assert load.failed == []
    assert {outcome.replica for outcome in load.outcomes[count + 6 :]} == {"r1"}
    assert [replica["state"] for replica in fleet.status()["replicas"]] == ["ready", "absent", "absent"]
    with pytest.raises(RooflineError, match="4 replicas: there are places for 1 to 3"):
        fleet.send(command="scale", replicas=4)


@pytest.mark.slow
def test_haproxy_is_replaced_under_load_and_started_again_when_it_ends(start_fleet):
    fleet = start_fleet("small?gap=0.01", "--replicas=2")
    fleet.wait_ready(2)
    before = fleet.status()["router"]["pid"]
    with load_on(fleet.address, lambda number: {**STREAM, "max_tokens": 10}) as load:
        for _ in range(3):
            load.wait_for(8)
            fleet.send(command="reload")
        load.wait_for(8)
    assert load.failed == []
    after = fleet.status()["router"]["pid"]
    assert after != before
    fleet.eventually(lambda: not is_alive(before))
    os.kill(after, signal.SIGKILL)
    assert ask(fleet.address, {"prompt": "a"}).error is None  # it waits in the socket
    assert fleet.status()["router"]["restarts"] == 1


@pytest.mark.slow
def test_sigterm_lets_streams_end_and_leaves_nothing(start_fleet):
    fleet = start_fleet("small?gap=0.02", "--replicas=2")
    fleet.wait_ready(2)
    pids, address = fleet.pids(), fleet.address
    assert len(pids) >= 4
    with load_on(address, lambda number: STREAM) as load:
        fleet.eventually(lambda: sum(r["figures"]["running"] for r in fleet.status()["replicas"] if r["figures"]) == 4)
        fleet.process.terminate()
        fleet.process.wait(30)
    finished = [outcome for outcome in load.outcomes if outcome.events]
    assert len(finished) >= 4
    assert [outcome.error for outcome in finished] == [None] * len(finished)
    assert fleet.process.returncode == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not fleet.folder.is_running()
    assert not fleet.folder.state_file.exists()


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(start_fleet):
    fleet = start_fleet("small?gap=30", "--replicas=1")
    fleet.wait_ready(1)
    pids = fleet.pids()
    with load_on(fleet.address, lambda number: STREAM, workers=1) as load:
        fleet.eventually(lambda: any(r["figures"]["running"] for r in fleet.status()["replicas"] if r["figures"]))
        fleet.process.terminate()
        fleet.eventually(lambda: fleet.status()["stopping"])
        fleet.process.terminate()
        fleet.process.wait(20)
        load._stop.set()
    assert load.failed
    assert not any(is_alive(pid) for pid in pids)


def test_nothing_is_left_of_a_supervisor_that_is_killed_and_its_folder_is_taken_over(start_fleet):
    fleet = start_fleet("small", "--replicas=2")
    fleet.wait_ready(2)
    pids = fleet.pids()
    os.kill(fleet.process.pid, signal.SIGKILL)
    fleet.process.wait(10)
    fleet.eventually(lambda: not any(is_alive(pid) for pid in pids), 10)
    assert fleet.folder.state_file.exists()  # nobody has removed it
    assert not fleet.folder.is_running()
    with pytest.raises(ConfigError, match="no fleet named 'default' runs here"):
        fleet.status()
    again = start_fleet("small", "--replicas=1")
    again.wait_ready(1)
    assert again.status()["pid"] == again.process.pid


@pytest.mark.slow
def test_a_name_belongs_to_one_fleet(start_fleet):
    fleet = start_fleet("small", "--replicas=1")
    fleet.wait_ready(1)
    other = start_fleet("small", "--replicas=1")
    assert other.process.wait(30) == 1
    assert f"a fleet named 'default' runs already, in process {fleet.process.pid}" in other.log.read_text()
    beside = start_fleet("small", "--replicas=1", "--name=second")
    beside.wait_ready(1)
    assert fleet.status()["address"] != beside.status()["address"]


def test_a_fleet_of_which_nothing_can_start_ends_with_the_reason(start_fleet):
    fleet = start_fleet("small?fail=the model is unknown", "--replicas=2")
    assert fleet.process.wait(30) == 1
    assert "roofline: the model is unknown" in fleet.log.read_text()
    assert "ended before it was ready: exit status 1" in fleet.log.read_text()


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(start_fleet):
    fleet = start_fleet("small", "--replicas=1")
    fleet.wait_ready(1)
    port = fleet.address.rpartition(":")[2]
    other = start_fleet("small", "--replicas=1", "--name=second", f"--port={port}")
    assert other.process.wait(30) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in other.log.read_text()
    assert "Choose another --port" in other.log.read_text()


def test_starts_are_further_apart_the_more_fail():
    assert [pause_before(failures) for failures in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.slow
def test_a_stopped_supervisor_still_lets_requests_through(start_fleet):
    """Requests go through HAProxy and the replicas alone: the supervisor may be busy."""
    fleet = start_fleet("small", "--replicas=1")
    fleet.wait_ready(1)
    address = fleet.address
    os.kill(fleet.process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert ask(address, {"prompt": "a"}).error is None
        assert time.monotonic() - begun < 10
    finally:
        os.kill(fleet.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_policy_is_asked_how_many_there_should_be(start_fleet):
    fleet = start_fleet("small", "--replicas=1", "--max-replicas=2", STUB_POLICY="2")
    fleet.wait_ready(2)
    assert fleet.status()["wanted"] == 2
