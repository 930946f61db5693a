"""A fleet whose load says how many servers run: the policy in the supervisor, its record, and options that need it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from roofline.common.errors import ConfigError, RooflineError
from roofline.deploy.options import FleetOptions
from roofline.deploy.scaling import FleetLoad, ScalingTargets, replay
from roofline.deploy.supervisor.autoscaler import RECORD, Autoscaler, FleetReading, read_record
from roofline.deploy.supervisor.figures import ReplicaFigures
from roofline.deploy.supervisor.setup import set_up_fleet
from roofline.engine.config import EngineConfig
from roofline.server.options import ServeOptions
from tests.deploy.load import ask, load_on

TARGETS = ScalingTargets(max_replicas=3, utilisation=1.0, queue_seconds=2.0, first_token_seconds=1.0, calm_seconds=5.0)
FIGURES = ReplicaFigures(
    running=2, waiting=5, served=1, tokens=9, tokens_per_second=1.0, moment=0.0, oldest_seconds=1.5, held=3
)


def test_what_servers_tell_is_what_the_policy_is_asked_with(tmp_path, caplog):
    now, latencies = [100.0], [(None, None), (1.5, 0.01)]
    scaler = Autoscaler(TARGETS, 4, lambda: latencies.pop(0), tmp_path / RECORD, lambda: now[0])
    reading = FleetReading(2, 1, [FIGURES])
    with caplog.at_level("INFO"):
        assert scaler(reading) == 2
        now[0] += 9
        assert scaler(FleetReading(2, 2, [FIGURES, replace(FIGURES, running=0, held=0, oldest_seconds=0.1)])) == 3
    first, second = (load for load, _, _ in read_record(tmp_path / RECORD))
    assert first == FleetLoad(seconds=0.0, up=1, starting=1, slots=4, running=2, waiting=3, queue_seconds=1.5)
    assert (second.seconds, second.up, second.starting, second.running, second.waiting) == (9.0, 2, 0, 2, 3)
    assert (second.first_token_seconds, second.token_seconds) == (1.5, 0.01)
    assert caplog.messages == [
        "3 servers in place of 2: 95 % of the first tokens came within 1.5 s, more than 1; max_replicas=3 is the most"
    ]
    assert scaler.last is not None
    assert [(count, reason) for _, count, reason in read_record(tmp_path / RECORD)][1] == (3, scaler.last.reason)


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, caplog):
    scaler = Autoscaler(TARGETS, 4, lambda: (None, None), tmp_path / "gone" / RECORD)
    assert [scaler(FleetReading(1, 1, [])) for _ in range(3)] == [1, 1, 1]
    assert len(caplog.messages) == 1
    assert "decisions are not recorded in" in caplog.messages[0]


@pytest.mark.parametrize(
    ("fleet", "scaling", "message"),
    [
        ({}, {"min_replicas": 2}, "min_replicas is about a fleet that its load scales: give --autoscale too"),
        ({"requests_per_replica": 4}, {}, "requests_per_replica is about a fleet that its load scales"),
        ({"autoscale": True}, {}, "give requests_per_replica, or max_running"),
        ({"autoscale": True, "requests_per_replica": 4}, {"min_replicas": 3}, "min_replicas=3 is more than 1"),
    ],
)
def test_options_that_need_each_other(fleet, scaling, message):
    with pytest.raises(ConfigError, match=message):
        set_up_fleet(FleetOptions(replicas=1, **fleet), ServeOptions("m"), ScalingTargets(**scaling))


def test_the_setup_of_a_scaled_fleet():
    options = FleetOptions(replicas=1, max_replicas=2, autoscale=True)
    serve = ServeOptions("m", engine=EngineConfig(max_running=7))
    setup = set_up_fleet(options, serve, ScalingTargets(min_replicas=2))
    assert (setup.replicas, setup.max_count, setup.slots) == (2, 2, 7)
    assert setup.scaling == ScalingTargets(min_replicas=2, max_replicas=2)
    assert set_up_fleet(replace(options, autoscale=False), serve).scaling is None


def test_servers_come_with_the_load_and_leave_after_it(start_fleet):
    words = ("--autoscale", "--requests-per-replica=2", "--utilisation=1", "--calm-seconds=1", "--queue-seconds=60")
    fleet = start_fleet("small?gap=0.02&slots=2", "--replicas=1", "--max-replicas=3", *words)
    fleet.wait_ready(1)
    with load_on(fleet.address, lambda number: {"prompt": "a", "max_tokens": 5, "stream": True}, workers=6) as load:
        fleet.wait_ready(3)
        load.wait_for(30)
        assert {outcome.replica for outcome in load.outcomes[-12:]} == {"r1", "r2", "r3"}
    assert load.failed == []
    assert fleet.status()["scaling"]["replicas"] == 3
    with pytest.raises(RooflineError, match="the load says how many servers"):
        fleet.send(command="scale", replicas=1)
    fleet.wait_ready(1)
    record = list(read_record(fleet.folder.path / RECORD))
    targets = ScalingTargets(max_replicas=3, utilisation=1.0, calm_seconds=1.0, queue_seconds=60.0)
    again = [(decision.replicas, decision.reason) for decision in replay(targets, (load for load, _, _ in record))]
    assert again == [(count, reason) for _, count, reason in record], "a recorded run can be decided again"
    assert {count for count, _ in again} >= {1, 3}


@pytest.mark.slow
def test_the_last_server_leaves_and_the_next_request_waits_for_one(start_fleet):
    words = ("--autoscale", "--requests-per-replica=2", "--min-replicas=0", "--idle-seconds=1", "--calm-seconds=1")
    fleet = start_fleet("small?gap=0.01&start=0.2", "--replicas=2", "--max-replicas=2", *words)
    fleet.wait_ready(2)
    address = fleet.address
    assert ask(address, {"prompt": "a"}).error is None
    for change in ("none", "reload", "proxy"):
        fleet.wait_ready(0)
        fleet.eventually(lambda: fleet.status()["wanted"] == 0)
        assert {replica["state"] for replica in fleet.status()["replicas"]} <= {"absent", "draining"}
        if change == "reload":
            fleet.send(command="reload")
        elif change == "proxy":
            pid = fleet.status()["router"]["pid"]
            os.kill(pid, signal.SIGKILL)
            fleet.eventually(lambda pid=pid: fleet.status()["router"]["pid"] not in (pid, None))
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda _: ask(address, {"prompt": "a"}), range(4)))
        assert [outcome.error for outcome in outcomes] == [None] * 4, change
        fleet.eventually(lambda: fleet.replica("r1")["proxy"] == "UP")  # its health is asked for again
    record = list(read_record(fleet.folder.path / RECORD))
    assert "no request for 1 s" in {reason for _, _, reason in record}
    assert any(load.up == load.starting == 0 and load.waiting == 1 for load, _, _ in record)
