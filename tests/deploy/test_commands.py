"""The commands about a fleet that runs, over stub replicas; and what of the machine replicas get."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError, ConfigError
from roofline.deploy import places
from roofline.deploy.children import bound_log, log_tail
from roofline.deploy.options import FleetOptions
from roofline.deploy.supervisor.folder import FleetFolder
from tests.command_line import call_roofline


def test_commands_find_the_fleet_and_change_it(start_fleet, home, monkeypatch):
    fleet = start_fleet("small", "--replicas=1", "--max-replicas=2")
    fleet.wait_ready(1)
    monkeypatch.setenv("ROOFLINE_HOME", str(home))
    pulled = []
    monkeypatch.setattr("roofline.cli.run.prepare.pull", pulled.append)

    def call(*words: str) -> str:
        result = call_roofline([*words])
        assert result.exit_code == 0, result.output
        return result.stdout

    fleet.eventually(lambda: fleet.replica("r1")["proxy"] == "UP")
    first, second, third, _, *rows = call("status").splitlines()
    assert first == f"default: small on {fleet.address}, 1 of 1 ready"
    assert second.startswith("balance leastconn, statistics http://127.0.0.1:")
    assert third.endswith(f", and {fleet.address}/metrics")
    (row,) = rows
    assert row.split()[:3] == ["r1", "ready", "UP"]
    assert json.loads(call("status", "--json"))["replicas"][1]["state"] == "absent"

    call("scale", "2")
    fleet.wait_ready(2)
    assert call("roll", "other").splitlines() == [
        *("r1: starting other", "r1: replaced", "r2: starting other", "r2: replaced"),
    ]
    assert pulled == ["other"]
    assert {replica["model"] for replica in fleet.status()["replicas"]} == {"other"}
    refused = call_roofline(["scale", "3"])
    assert (refused.exit_code, "places for 1 to 2" in refused.stderr) == (1, True)
    call("down")
    assert fleet.process.wait(10) == 0
    for words in (["status"], ["down"], ["roll"], ["scale", "1"], ["status", "--name", "other"]):
        missing = call_roofline(words)
        assert missing.exit_code == 1
        assert "start one by `roofline up MODEL`" in missing.stderr


def test_a_folder_that_sockets_do_not_fit_in_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at most 70 bytes; set ROOFLINE_HOME to a shorter folder"):
        FleetFolder("name", tmp_path / ("x" * 60)).acquire()
    for name in ("", "a/b", "..", "x" * 41):
        with pytest.raises(ConfigError, match="cannot be used"):
            FleetOptions(name=name)


def test_devices_are_divided_in_their_order(monkeypatch):
    devices = tuple(SimpleNamespace(id=f"nvidia:{number}") for number in range(5))
    monkeypatch.setattr(places, "gpu_devices", lambda load: devices)
    load = LoadOptions(backend="gpu", tensor_parallel=2)
    assert [(part.device, cores) for part, cores in places.replica_places(load, 2)] == [
        ("nvidia:0,nvidia:1", []),
        ("nvidia:2,nvidia:3", []),
    ]
    assert places.automatic_count(load) == 2
    with pytest.raises(CapacityError, match=r"6 devices, 5 are available. Give --replicas 2"):
        places.replica_places(load, 3)


@pytest.mark.parametrize(("threads", "nodes", "count"), [(1, 1, 1), (2, 1, 2), (64, 1, 2), (64, 4, 4), (6, 8, 4)])
def test_a_host_has_a_replica_for_each_node_and_two_at_least(tmp_path: Path, threads, nodes, count):
    for number in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    assert places.automatic_count(LoadOptions(threads=threads), tmp_path) == count


def test_logs_are_bounded(tmp_path):
    path = tmp_path / "r1.log"
    with path.open("ab", buffering=0) as stream:
        stream.write(b"first\n" * 100)
        bound_log(path, 1000)
        assert path.stat().st_size == 600
        stream.write(b"second\n" * 100)
        bound_log(path, 1000)
        assert path.stat().st_size == 0
        stream.write(b"third\n")
    assert path.read_bytes() == b"third\n"
    assert (tmp_path / "r1.log.1").stat().st_size == 1300
    assert log_tail(path) == "    third"
