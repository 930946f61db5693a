"""Two hosts that share nothing but a network: namespaces with a cable between them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training is torch")

from roofline.train.data import receipts
from roofline.train.run_folder import LOG, read_lines
from tests.train import small

ADDRESSES = "10.203.77.1", "10.203.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces that reach each other and nothing else."""
    names = [f"roofline-{os.getpid()}-{i}" for i in range(2)]
    cables = [f"rl{os.getpid() % 100000}{end}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("no ip command to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("netns", "exec", name, "ip", "link", "set", cable, "name", "eth0")
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                *(("link", "set", e, "up") for e in ("eth0", "lo")),
            ):
                ip("netns", "exec", name, "ip", *words)
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield names
    _remove(names)


def _remove(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", name)


@pytest.mark.slow
def test_two_hosts_train_the_run_of_one_process(hosts: list[str], tmp_path: Path) -> None:
    from roofline.train.run.loop import train

    data = small.write_rows(tmp_path / "data", 60)
    common = {"max_duration": "4ba", "save_interval": "2ba", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
    train(small.config(data, tmp_path / "one", max_duration="4ba", save_interval="2ba"))
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(small.mapping(data, tmp_path / "two", **common)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = [f"--master-addr={ADDRESSES[0]}", "--master-port=29511", "-m", "roofline.train", str(path)]
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *launcher, f"--node-rank={rank}", *meeting],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)[-3000:]
    runs = [receipts.read(tmp_path / name) for name in ("one", "two")]
    assert receipts.compare(*runs) == receipts.Comparison(4)
    losses = [[line["loss"] for line in read_lines(tmp_path / name / LOG) if "loss" in line] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert small.steps_of(tmp_path / "two" / "checkpoints") == [2, 4]
