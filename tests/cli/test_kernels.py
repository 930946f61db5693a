"""What `roofline kernels` prints, over proofs that are made up, and what it refuses."""

import json

import pytest

from roofline import bundle
from roofline.backends.backend import CompiledAhead
from roofline.backends.gpu.ahead import check as static
from roofline.backends.gpu.ahead import kernel_list as catalogue
from roofline.backends.gpu.ahead.binary_facts import Facts
from roofline.backends.gpu.ahead.gates import GateViolation
from roofline.hardware.chips.occupancy import Occupancy
from tests.command_line import call_roofline

FACTS = Facts(94, 0, 38, 0, 0, 8192, 0, 4772, 4, {"v_mfma_f32_32x32x8_bf16": 2}, {"bf16": 1}, {})
FAULT = GateViolation("attend", "wide", "gfx942", "spills", "7 registers", "0", "take a smaller tile")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command over two proofs a chip, one of them with a fault if asked for."""
    asked = []

    def call(*words, fault=False):
        def prove(wanted, *, kernel, jobs):
            asked.append(([chip.name for chip in wanted], kernel, jobs))
            for chip in wanted:
                good = (FACTS, Occupancy(4, 5.0, 0.625, "registers"), (), 0.25, "3.7.1")
                yield static.Proof(chip.name, "attend", "wide", "BLOCK=64 4w 2s", *good)
                if fault:
                    yield static.Proof(chip.name, "attend", "odd", "4w 2s", None, None, (FAULT,), 0.1, "3.7.1")

        monkeypatch.setattr(static, "prove", prove)
        monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        return call_roofline(["kernels", *words])

    call.asked = asked
    return call


def test_the_table(run):
    result = run("--chip", "gfx942:xnack-,9.0", "--kernel", "attend", "--jobs", "2")
    assert result.exit_code == 0, result.output
    assert run.asked == [(["gfx942", "sm_90"], "attend", 2)]
    row = next(line for line in result.output.splitlines() if "BLOCK=64" in line)
    for word in ("attend", "wide", "94", "8192", "5 (registers)", "2 v_mfma_f32_32x32x8_bf16", "ok"):
        assert word in row


def test_a_fault_is_told_and_is_the_exit_status(run):
    for words in (("--chip", "gfx942"), ("--build", "gfx942")):
        result = run(*words, fault=True)
        assert result.exit_code == 1
        assert "attend [wide] on gfx942: spills: 7 registers; allowed: 0. To do: take a smaller tile." in result.output


def test_json(run):
    proofs = json.loads(run("--chip", "gfx942", "--json").output)
    assert proofs[0]["facts"]["registers"] == 94
    assert proofs[0]["occupancy"]["bound"] == "registers"


def test_build_says_where(run, tmp_path):
    result = run("--build", "gfx942,sm_90")
    assert "gfx942: 1 of 1 binaries, 250.00 ms of compiling" in result.output
    assert f"they lie in {tmp_path / 'kernels'}" in result.output


def test_build_for_a_model(run, monkeypatch):
    def compile_ahead(model, options, chips):
        asked = {"weights": "random:1", "exact": True, "kv_cache_dtype": "fp8", "activations": "fp8"}
        assert (model, options.changes()) == ("tiny", {"backend": "gpu"} | asked)
        yield from (CompiledAhead(chip, 30, 4) for chip in chips)

    monkeypatch.setattr(bundle, "compile_ahead", compile_ahead)
    result = run(
        "--build", "gfx942,sm_90", "--model", "tiny", "--weights", "random:1", "--exact", "--kv-cache-dtype", "fp8",
        "--activations", "fp8",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "gfx942: 30 binaries, 4 of them compiled now\nsm_90: 30 binaries" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Name chips with --chip"),
        (("--chip", "gfx942", "--build", "gfx942"), "Name chips with --chip"),
        (("--chip", "gfx942,cray1"), "'cray1' is not supported"),
        (("--build", "gfx1030"), "RDNA 1 and 2"),
        (("--chip", ""), "chip '' is not supported"),
        (("--chip", "gfx942", "--model", "tiny"), "--model goes with --build"),
        (("--build", "gfx942", "--model", "tiny", "--json"), "without --kernel and --json"),
        (("--build", "gfx942", "--exact"), "name it with --model"),
        (("--build", "gfx942", "--kv-cache-dtype", "fp8"), "name it with --model"),
        (("--build", "gfx942", "--activations", "fp8"), "name it with --model"),
    ],
)
def test_refused(run, words, said):
    result = run(*words)
    assert result.exit_code == 1
    assert said in result.stderr
    assert not run.asked


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None if name == "triton" else True)
    result = call_roofline(["kernels", "--chip", "gfx942"])
    assert result.exit_code == 1
    assert "pip install 'roofline[gpu]'" in result.stderr
