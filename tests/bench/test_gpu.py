"""benchmarks/gpu.py: what is measured fits, no part loses another's rows, and targets are judged by what they say."""

import argparse
import json
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the gpu backend's programs are planned with it")

from benchmarks import gpu, gpu_parts, gpu_targets
from benchmarks.gpu_parts import Given

HEAD = {**dict.fromkeys(gpu.SAME, "x"), "versions": {"torch": "2.11"}, "date": "today"}


def given(keep=lambda rows: None):
    return Given("llama-2-7b", None, gpu_parts.BATCHES, None, keep)


def test_the_published_lengths_are_the_sampler_s():
    published = [tuple(pair) for pair in json.loads(gpu_parts.TYPICAL.read_text())["lengths"]]
    assert published == gpu_parts.typical_lengths(256)
    assert all(prompt >= 1 and prompt + answer <= 960 and 1 <= answer <= 80 for prompt, answer in published)


@pytest.mark.parametrize("part", ["four_bit", "serve", "exact"])
def test_what_a_part_loads_fits_the_device_it_is_written_for(monkeypatch, part):
    """An H200, as nvidia-smi counts its memory; what the parts run fits what they loaded."""
    from roofline.backends.gpu.backend import RESERVED, scratch_bytes
    from roofline.backends.gpu.memory.capacity import Budget, place
    from roofline.backends.gpu.memory.requirements import needs_of
    from roofline.backends.gpu.program import compile_for_gpu
    from roofline.backends.options import LoadOptions
    from roofline.models.config import ModelConfig
    from roofline.models.presets import preset
    from roofline.ops.batch import BatchLimits
    from roofline.weights.random_weights import pooled_checkpoint

    shape, asked = {**preset("llama-2-7b"), "layers": 2}, []

    class Model:
        notes, executable = {}, None

    @contextmanager
    def loaded(_, form, *, tokens, running, length, exact=False, step=gpu_parts.STEP):
        source = pooled_checkpoint(shape, 0, form)
        config = ModelConfig.of(source.config)
        program = compile_for_gpu(source, config, LoadOptions(backend="gpu", exact=exact))
        limits = BatchLimits(tokens=step, segments=running, rows=running, pages=running * -(-length // 16))
        needs = needs_of(program, limits, extra=scratch_bytes(program, limits))
        whole = type(needs)(needs.layers * 16, needs.ends, 16 * needs.token, needs.workspace, 1)  # of 32 layers
        placed = place(whole, Budget("H200", int(143771 * 2**20 * (1 - RESERVED))), least_tokens=length, tokens=tokens)
        assert placed.pages * 16 >= tokens
        asked.append((tokens, running, length, step))
        yield Model

    def decode(_, batch, context, copy, steps=64):
        tokens, running, length, step = asked[-1]
        assert batch <= running
        assert batch * context <= step, "the prompts are one step"
        assert context + steps + 1 <= length
        assert batch * (-(-(context + steps + 1) // 16)) * 16 <= tokens
        return {"ms_per_token": 1.0, "share_of_copy": 0.9}

    def served(_, form, lengths):
        tokens, running, length, _ = asked[-1]
        assert len(lengths) <= running
        assert max(prompt + answer for prompt, answer in lengths) + 1 <= length
        assert sum(-(-(prompt + answer + 1) // 16) * 16 for prompt, answer in lengths) <= tokens
        return {f"{form} {len(lengths)}": {}}

    monkeypatch.setattr(gpu_parts, "loaded", loaded)
    monkeypatch.setattr(gpu_parts, "decode", decode)
    monkeypatch.setattr(gpu_parts, "_served", served)
    monkeypatch.setattr(gpu_parts, "copied", lambda: 4e12)
    monkeypatch.setattr(gpu_parts, "_prefill", lambda *_: {})
    monkeypatch.setattr(gpu_parts, "differences", lambda _: {"of": 32})
    Model.executable = argparse.Namespace(graphs_captured=lambda: "")
    kept = []
    made = gpu_parts.PARTS[part](given(lambda rows: kept.append(json.dumps(rows))))
    assert len(asked) == {"four_bit": 3, "serve": 2, "exact": 4}[part]
    assert len(kept) >= len(asked), "rows are kept as they come"
    assert json.loads(kept[-1])["rows"] == made["rows"]


def test_the_parts_run(monkeypatch, tmp_path, tiny_llama):
    """On the cpu backend, whose engine is the same: exact and decoded, served with and without overlap."""
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    from roofline.bundle import load
    from roofline.common.errors import RooflineError

    (tmp_path / "config.json").write_text(json.dumps(tiny_llama))
    options = {"max_running": 8, "max_batch_tokens": 64, "cache_tokens": 1024, "text": False, "threads": 1}
    model = load(str(tmp_path), weights="random:1:BF16", **options)
    model.executable.graphs_captured = lambda: "none asked for"
    row = gpu_parts.decode(model, 2, 8, copy=1e9, steps=4)
    assert row["tok_s"] == pytest.approx(8 / sorted(row["seconds"])[1])
    assert row["share_of_copy"] == pytest.approx(row["bytes"] * 4 / 1e9 / sorted(row["seconds"])[1])
    found = gpu_parts.differences(model.executable, prompts=4, shortest=3, growing=7)
    assert found == {"equal in company": 4, "equal in chunks": 4, "equal decoding": 4, "of": 4, "finite": True}
    lengths = [(5, 3), (30, 1), (2, 9)]
    assert gpu_parts.requests(model.executable, lengths, overlap=True) > 0
    monkeypatch.setattr(model.executable, "forward", lambda: 1 / 0)
    with pytest.raises(RooflineError, match="failed during the bench"):
        gpu_parts.requests(model.executable, lengths, overlap=False)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs gpu.main with parts of the test's own, in this process; its status and the record."""
    out = tmp_path / "new" / "record.json"

    def child(words, seconds):
        if seconds <= 0:
            return "no time was left for it"
        status = gpu.main(words)
        return f"it ended with status {status}" if status else ""

    def asked(command, **_):
        assert command[-1] == "--in-process=head"
        return argparse.Namespace(returncode=0, stdout=json.dumps(HEAD).encode())

    monkeypatch.setattr(gpu, "_child", child)
    monkeypatch.setattr(gpu.subprocess, "run", asked)
    monkeypatch.setattr(gpu, "_state", dict)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr("roofline.backends.gpu.ahead.kernel_cache.use", lambda: None)

    def call(parts, *words):
        monkeypatch.setattr(gpu_parts, "PARTS", parts)
        status = gpu.main([*parts, "-o", str(out), *words])
        return status, json.loads(out.read_text())

    call.out = out
    return call


def test_rows_stay_where_a_part_fails(run):
    def broken(asked):
        asked.keep({"rows": {"first": 1.0, "second": float("nan")}})
        raise ValueError("no room\nat all")

    status, record = run({"roofs": lambda asked: {"rows": [asked.preset]}, "serve": broken})
    assert status == 1
    assert record["parts"]["roofs"] | {"seconds": 0} == {
        "complete": True, "seconds": 0, "before": {}, "after": {}, "rows": ["llama-2-7b"], "targets": []
    }  # fmt: skip
    assert record["parts"]["serve"]["rows"] == {"first": 1.0, "second": None}
    assert record["parts"]["serve"]["error"] == "ValueError: no room"
    assert not record["parts"]["serve"]["complete"]


def test_a_record_is_of_one_device_and_keeps_its_other_parts(run, monkeypatch):
    run({"roofs": lambda _: {}})
    status, record = run({"grid": lambda asked: {"rungs": asked.rungs, "cells": []}}, "--rungs", "eager,paged")
    assert status == 0
    assert set(record["parts"]) == {"roofs", "grid eager,paged"}
    monkeypatch.setitem(HEAD, "device", "another")
    with pytest.raises(SystemExit, match="device 'x' and not 'another': name another file"):
        run({"roofs": lambda _: {}})
    assert set(json.loads(run.out.read_text())["parts"]) == {"roofs", "grid eager,paged"}


def test_a_wrong_kernel_is_a_failure_and_no_time_is_told(run):
    assert run({"kernels": lambda _: {"wrong": ["norm"]}})[0] == 1
    status, record = run({"serve": lambda _: {}}, "--seconds", "1e-9")
    assert status == 1
    assert record["parts"]["serve"] == {"complete": False, "error": "no time was left for it"}


def test_a_part_that_is_cut_off_says_so(monkeypatch, tmp_path):
    """In a process of its own, which is ended."""
    monkeypatch.setattr(gpu, "_command", lambda _: ["sleep", "60"])
    assert gpu._child([], 0.2) == "cut off after 0 s"
    monkeypatch.setattr(gpu, "_command", lambda _: ["false"])
    assert gpu._child([], float("inf")) == "it ended with status 1"


def test_options_reach_the_parts():
    there = str(Path("x.json").resolve())
    assert gpu._without(["grid", "-o", "x.json", "--rungs=a", "serve", "--batches", "1,8"]) == [
        "-o", there, "--rungs=a", "--batches", "1,8"
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        gpu.arguments(["nothing", "-o", "x"])
    with pytest.raises(SystemExit):
        gpu.arguments(["-o", "x", "--batches", "1;8"])
    assert gpu.arguments(["-o", "x", "--batches", "1,4"]).batches == (1, 4)


def test_targets_are_judged():
    def cell(new, share, seconds):
        rung = {"share": share, "latency": {"median": seconds}}
        return {"cell": "c", "new": new, "limit": {"flops": 6e14}, "rungs": {"graphs": rung, "eager": {}}}

    grid = {"datasheet": {"bf16": 1e15}, "cells": [cell(1, 0.7, 0.99), cell(1, 0.7, 1.01), cell(32, 0.8, 1.0)]}
    assert [target["met"] for target in gpu_targets.judged("grid", grid)] == [True, False, True]
    del grid["datasheet"]
    assert [target["met"] for target in gpu_targets.judged("grid", grid)] == [False, False, True]
    rows = {"BF16 batch 1": {"share_of_copy": 0.79}, "Q4_0 batch 1": {"share_of_copy": 0.6}}
    assert [target["met"] for target in gpu_targets.judged("four_bit", {"rows": rows})] == [False, True, False]
    equal = {"of": 32, "equal in company": 32, "equal in chunks": 31, "equal decoding": 32}
    judged = gpu_targets.judged("exact", {"rows": {"BF16 exact": equal, "BF16 fast": equal}})
    assert [target["met"] for target in judged] == [True, False, True]
    assert gpu_targets.judged("roofs", {}) == []
