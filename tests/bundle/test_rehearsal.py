"""What was rehearsed for a chip that is not here is all that serving asks for: no step compiles anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.fixture
def run(request):
    """(mode, chip, format, cache, activations) -> what gpu_rehearsed.py printed, in a process that compiles."""
    folder = request.config.cache.mkdir("kernels")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

    def call(*words):
        script = Path(__file__).parent / "gpu_rehearsed.py"
        command = [sys.executable, str(script), *words, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("sm_90", "BF16", "auto", "auto"), marks=pytest.mark.soak),
        ("gfx942", "Q4_K", "fp8", "auto"),
        ("sm_90", "E4M3", "auto", "fp8"),
    ],
)
def test_serving_compiles_nothing_that_was_not_rehearsed(run, given):
    """Random steps on tensors in memory find what was compiled on tensors without, in another process."""
    run("rehearse", *given)
    served = run("serve", *given)
    assert served["asked"] > 15
    assert served["new"] == []
