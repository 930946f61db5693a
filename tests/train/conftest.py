"""Fixtures of the training tests: an S3 server, started once, and a proxy that fails on demand in front of it."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train import seaweed as helper

sys.path.insert(0, str(Path(__file__).parents[1] / "program"))  # program_builders


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[helper.Seaweed]:
    server, process = helper.start(tmp_path_factory.mktemp("seaweed"))
    yield server
    helper.stop(process)


@pytest.fixture(scope="session")
def bucket(seaweed: helper.Seaweed) -> str:
    """The name of a bucket for all tests: each takes a place of its own in it."""
    seaweed.bucket("tests")
    return "tests"


@pytest.fixture
def s3(seaweed: helper.Seaweed, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place; the environment leads to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(seaweed: helper.Seaweed, s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[helper.Proxy]:
    """The environment leads through it."""
    proxy = helper.Proxy(seaweed.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much where other processes want it too."""
    torch = pytest.importorskip("torch", reason="training is torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
