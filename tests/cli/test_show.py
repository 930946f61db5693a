"""roofline show on a real file: one screen, with and without measured roofs."""

import json
from pathlib import Path

import pytest

from roofline.hardware import detect, roofs
from tests.command_line import call_roofline


@pytest.fixture
def run(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: call_roofline(["show", str(smollm2_path), *args])


def test_one_layer_fits_one_screen(run) -> None:  # type: ignore[no-untyped-def]
    out = run()
    assert out.exit_code == 0, out.output
    lines = out.output.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "576 → 3072" in out.output
    assert "9/3 × 64" in out.output
    assert "roofline doctor" in out.output
    assert "…" not in out.output


def test_measured_roofs_give_microseconds(run) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("roofline._native", reason="it tells the instruction sets of this build")
    from roofline.backends.cpu.select import choose_isa, choose_threads

    threads, isa = int(choose_threads().value), str(choose_isa().value)
    made = roofs.Roofs(2e12, 1e12, 5e11, ((1 << 23, 1e11), (1 << 32, 5e10)), threads, isa, "chip", "now")
    roofs.store(made, detect.detect().fingerprint)
    decode, prefill = run("--context", "1024"), run("--tokens", "512", "--context", "0")
    assert "at the roof" in decode.output
    assert "us" in decode.output
    assert "prefill 512 tokens" in prefill.output
    assert "…" not in prefill.output


def test_pass_prints_the_program_text(run) -> None:  # type: ignore[no-untyped-def]
    from roofline.program.text import parse_program

    assert len(parse_program(run("--pass", "plan").output).body) == 1 + 30 * 10 + 4
    assert "fuse" in run("--pass", "fuze").stderr


def test_a_shape_without_weights_can_be_shown(run) -> None:  # type: ignore[no-untyped-def]
    out = call_roofline(["show", "preset:mpt-125m"])
    assert out.exit_code == 0, out.output
    for op, shape in (("layer_norm", "768"), ("qkv_write", "12/12 × 64"), ("gelu", "3072"), ("embed", "2048 × 768")):
        assert any(op in line and shape in line for line in out.output.splitlines()), op


def test_json_has_every_row_and_the_totals(run) -> None:  # type: ignore[no-untyped-def]
    record = json.loads(run("--json", "--context", "7").stdout)
    assert record["roofs"] is None
    assert record["work"]["context"] == 8
    attend = next(row for row in record["rows"] if row["op"] == "attend")
    assert (attend["section"], attend["times"]) == ("layer 0", 30)
    assert record["weight_bytes"] > 9e7


def test_a_bundle_is_shown_as_what_it_was_compiled_from(run, smollm2_path: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    assert call_roofline(["compile", smollm2_path, "-o", tmp_path / "b"]).exit_code == 0
    shown = call_roofline(["show", tmp_path / "b"])
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines()[-20:] == run().stdout.splitlines()[-20:]


def test_lib_is_json_too() -> None:
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    record = json.loads(call_roofline(["lib", "--json"]).stdout)
    assert record["flags"] == call_roofline(["lib", "--flags"]).stdout.strip()
    assert Path(record["header"]).name == "roofline.h"
