"""Backends from outside the tree: a module and an entry point, found by name, run by the engine, with ids to show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roofline.backends import table
from roofline.backends.backend import RunsBundles, ServesRanks
from roofline.backends.options import LoadOptions
from roofline.bundle import load
from roofline.common.errors import ConfigError, UnsupportedError

MODULE = '''
import numpy as np
from roofline.backends.base import MonotonicClock, StepCost
from roofline.backends.capacity import host_capacity
from roofline.backends.sampling import MAX_LOGPROBS, Sampled
from roofline.ops.batch import Batch


class Counting:
    """The most likely token is the one after the last."""

    exact, page_bytes, fingerprint = True, 0, "counting"

    def __init__(self, config, capacity):
        self.limits, self.num_pages, self.max_context = capacity.limits, capacity.num_pages, capacity.max_context
        self.batch, self.clock, self.vocab_size = Batch(self.limits), MonotonicClock(), config.vocab

    def forward(self):
        rows = self.batch.logit_rows[: self.batch.rows]
        self.ids = ((self.batch.ids[rows] + 1) % self.vocab_size).astype(np.int32)

    def logits(self):
        return np.eye(self.vocab_size, dtype=np.float32)[self.ids]

    def sample(self, rows):
        n = len(self.ids)
        nothing = np.full((n, MAX_LOGPROBS), -1, np.int32)
        return Sampled(self.ids, np.full(n, np.nan, np.float32), nothing, nothing.astype(np.float32))

    def step_cost(self):
        return StepCost(0, 0, 0, None)

    def close(self):
        pass


class CountingBackend:
    def resolve(self, options, neighbours):
        return options

    def capacity(self, options, config, replicas):
        return host_capacity(options, config, "bf16", replicas)

    def make(self, request):
        return Counting(request.config, request.capacity), {"backend": "counts"}


BACKEND = CountingBackend()


def register():
    from roofline.extend import register_backend

    register_backend("counting", "counting_backend:BACKEND")
'''

RUN = """
import sys
from roofline.bundle import load
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
loaded = load(sys.argv[1], backend="counting", weights="random:1", cache_tokens=64, max_running=1, text=False)
engine = LocalEngine(loaded.executable)
engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
ids = []
while engine.has_work:
    ids += [token for event in engine.step() for token in event.ids]
print(ids, loaded.notes["backend"], "torch" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: dict[str, Any]) -> Path:
    """A configuration; its weights are random."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    return tmp_path


def test_a_backend_of_an_installed_package_is_a_folder_and_one_row(folder: Path) -> None:
    site = folder / "site"
    info = site / "counting_package-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "counting_backend.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[roofline.extensions]\ncounting = counting_backend:register\n")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *(p for p in sys.path if p)])}
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[4, 5, 6, 7] counts False\n"
    # The command line takes it too: what follows is the folder's error, not one about the backend.
    call = f"from roofline.cli.main import main; main(['generate', 'hi', '--backend', 'counting', '--model', '{site}'])"
    done = subprocess.run([sys.executable, "-c", call], env=variables, capture_output=True, text=True, timeout=120)
    assert "holds neither *.safetensors nor *.gguf" in done.stderr


def test_a_backend_there_is_not_is_refused_with_those_there_are(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"there is no such backend.*Use instead: cpu, gpu, reference"):
        load(str(folder), backend="gpt")
    with pytest.raises(UnsupportedError, match=r"there is no such backend.*Use instead: cpu, gpu, reference"):
        table.get("gpt")
    with pytest.raises(ConfigError, match="'cpu' is already registered"):
        table.register("cpu", "nowhere:BACKEND")


def test_what_a_backend_cannot_do_is_refused_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    monkeypatch.setattr(table, "_BACKENDS", {**table._BACKENDS, "counting": names["BACKEND"]})
    with pytest.raises(UnsupportedError, match="2 ranks with backend 'counting'"):
        load(str(folder), backend="counting", weights="random:1", tensor_parallel=2)
    with pytest.raises(UnsupportedError, match=r"offload=1 with backend 'counting'.*backend=gpu"):
        LoadOptions(backend="counting", offload=1)
    assert isinstance(table.get("cpu"), RunsBundles)
    assert all(isinstance(table.get(name), ServesRanks) for name in ("cpu", "gpu", "reference"))
