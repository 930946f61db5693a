"""A bundle gives the same fingerprint, bits and ids as its source, wherever it lies; a damaged one is refused."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_models import FOREIGN_CODE

import roofline._native as native
from roofline.backends.cpu.truth import TruthError
from roofline.bundle import compile_model, load
from roofline.bundle.manifest import BundleError
from roofline.bundle.reader import open_bundle, verify
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.engine.llm import LLM
from roofline.engine.params import SamplingParams
from roofline.ops.batch import Segment

FILES = ("manifest.json", "code.bin", "weights.bin", "program.txt", "truth.bin", "tokenizer.bin", "template.jinja")


def logits(model: Any, ids: list[int]) -> bytes:
    executable = model.executable
    executable.batch.fill([Segment(ids, 0, list(range(-(-len(ids) // 16))))], range(len(ids)))
    executable.forward()
    return executable.logits().tobytes()


def same(path: Path, source: Path, **options: Any) -> None:
    one, two = load(str(path), **options), load(str(source), **options)
    assert one.executable.fingerprint == two.executable.fingerprint
    assert one.executable.weight_bytes == two.executable.weight_bytes
    ids = list(range(40))
    assert logits(one, ids) == logits(two, ids)
    assert one.executable.step_cost() == two.executable.step_cost()
    assert one.config == two.config


@pytest.mark.parametrize("isa", native.isas())
def test_a_bundle_runs_as_its_source(model: Path, bundle: Path, isa: str) -> None:
    assert sorted(f.name for f in bundle.iterdir()) == sorted(FILES)
    same(bundle, model, isa=isa, text=False)
    chat = [{"role": "user", "content": "Naïve <s> question"}]
    with LLM(str(bundle)) as one, LLM(str(model)) as two:
        params = SamplingParams(max_tokens=5, seed=1)
        first, second = one.chat(chat, params), two.chat(chat, params)
        assert (first.prompt_ids, first.ids, first.text) == (second.prompt_ids, second.ids, second.text)


def test_a_template_of_the_caller_is_used_instead_of_the_bundle_s(bundle: Path) -> None:
    chat, params = [{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2, seed=1)
    with LLM(str(bundle)) as llm:
        for variables, text in (({}, "<s>Ask: hello!"), ({"mark": "?"}, "<s>Ask: hello?")):
            source = "{{ bos_token }}Ask: {{ messages[0]['content'] }}{{ mark or '!' }}"
            answer = llm.chat(chat, params, chat_template=source, **variables)
            assert answer.prompt_ids == llm.tokenizer.encode(text, add_special=False, parse_special=True)
        for wrong, message in (("{% if %}", "the chat template is not valid"), (3, "give its Jinja as a string")):
            with pytest.raises(ConfigError, match=message):
                llm.chat(chat, params, chat_template=wrong)  # type: ignore[arg-type]


def test_a_bundle_serves_every_format_of_the_cache(model: Path, bundle: Path) -> None:
    same(bundle, model, text=False, kv_cache_dtype="int8")
    bf16, int8 = (load(str(bundle), text=False, cache_tokens=512, kv_cache_dtype=kv) for kv in ("auto", "int8"))
    assert bf16.executable.fingerprint != int8.executable.fingerprint
    assert bf16.executable.page_bytes == 16 * 2 * 2 * 2 * (
        16 * 2
    )  # tokens, K and V, layers, kv heads, head_dim in bf16
    assert int8.executable.page_bytes == 16 * 2 * 2 * 2 * (16 + 4)
    ids = list(range(40))
    assert logits(bf16, ids) != logits(int8, ids)
    (group,) = int8.executable.program.kv_groups.values()
    assert group.format == "int8"
    with pytest.raises(ConfigError, match="choose one of auto, bf16, int8, fp8"):
        load(str(bundle), kv_cache_dtype="fp4")
    for backend in ("cpu", "reference"):
        with pytest.raises(UnsupportedError, match=r"fp8 KV cache without a GPU.*kv_cache_dtype=int8"):
            load(str(model), backend=backend, text=False, kv_cache_dtype="fp8")


@pytest.mark.slow
def test_the_real_model(smollm2_path: Path, tmp_path: Path) -> None:
    written = compile_model(str(smollm2_path), tmp_path / "bundle")
    same(written.path, smollm2_path, max_model_len=1024, cache_tokens=1024)
    assert verify(written.path).manifest.generation["eos_ids"]
    assert written.nbytes < 1.1 * smollm2_path.stat().st_size


def test_more_positions_than_the_table_has(model: Path, bundle: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("roofline.bundle.writer.MAX_POSITIONS", 16)
    short = compile_model(str(model), tmp_path / "short").path
    assert open_bundle(short).lowered.positions == 16
    same(short, model, text=False)


def test_moved_read_only_and_without_its_source(model: Path, bundle: Path, tmp_path: Path) -> None:
    wanted = logits(load(str(model)), [1, 2, 3])
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    shutil.rmtree(model)
    for file in moved.iterdir():
        file.chmod(0o444)
    moved.chmod(0o555)
    before = {file.name: file.stat().st_mtime_ns for file in moved.iterdir()}
    assert logits(load(str(moved)), [1, 2, 3]) == wanted
    assert {file.name: file.stat().st_mtime_ns for file in moved.iterdir()} == before
    moved.chmod(0o755)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    from bundle_models import write_model

    source = write_model(tmp_path / "bare", tokenizer=False)
    path = compile_model(str(source), tmp_path / "bundle").path
    same(path, source, text=False)
    with pytest.raises(ConfigError, match=r"has no tokenizer.*no tokenizer\.json beside the weights"):
        load(str(path))


def test_what_only_the_files_of_the_model_can_do(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="backend 'reference' needs the model's files"):
        load(str(bundle), backend="reference")
    with pytest.raises(ConfigError, match="weights 'random:1' needs the model's files"):
        load(str(bundle), weights="random:1")
    with pytest.raises(ConfigError, match="is a bundle already"):
        compile_model(str(bundle), bundle.parent / "again")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing.*roofline compile .* -o"):
        load(str(bundle))


@pytest.mark.parametrize("name", FILES[1:])
def test_a_cut_file(bundle: Path, name: str) -> None:
    os.truncate(bundle / name, (bundle / name).stat().st_size - 1)
    with pytest.raises(BundleError, match=f"{name} has [0-9,]+ bytes instead of"):
        load(str(bundle))


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_a_flipped_byte_anywhere(bundle: Path, name: str) -> None:
    raw = bytearray((bundle / name).read_bytes())
    for at in np.random.default_rng(0).integers(0, len(raw), 5):
        spoilt = raw.copy()
        spoilt[at] ^= 4
        (bundle / name).write_bytes(spoilt)
        with pytest.raises(BundleError, match=name):
            verify(bundle)
    (bundle / name).write_bytes(raw)
    verify(bundle)


@pytest.mark.parametrize("name", ["template.jinja", "tokenizer.bin", "program.txt", "truth.bin"])
def test_a_start_notices_a_changed_byte_of_a_small_file(bundle: Path, name: str) -> None:
    raw = bytearray((bundle / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (bundle / name).write_bytes(raw)
    with pytest.raises(BundleError, match=f"{name} is not as it was written: its hash is wrong.*roofline compile"):
        load(str(bundle))


def signed(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest that was changed by somebody who knows how its own hash is made."""
    values = json.loads((bundle / "manifest.json").read_text())
    change(values)
    values["id"] = hashlib.sha256(json.dumps(values | {"id": ""}, sort_keys=True).encode()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("files"), "files is not what it should be"),
        (
            lambda m: m["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": ""}}),
            "others than those of a bundle",
        ),
        (lambda m: m["files"].pop("truth.bin"), "files are missing"),
        (lambda m: m["config"].update(kv_heads=0), "config has a size below 1"),
        (lambda m: m["config"].update(layers=1), "are of two models"),
        (lambda m: m["config"].update(max_position="512"), "config is not what it should be"),
        (lambda m: m["config"].update(max_position=1 << 70), "config is not what it should be"),
        (lambda m: m["prices"]["counts"].append(1), "prices have columns of several lengths"),
        (lambda m: m["prices"]["kv"][-1].pop(), "prices have rows of another length"),
        (lambda m: m["prices"]["windows"].append(8), "prices have rows of another length"),
        (lambda m: m["prices"]["windows"].clear(), "prices have no windows, or a negative one"),
        (lambda m: m["prices"]["windows"].__setitem__(0, -1), "prices have no windows, or a negative one"),
        (lambda m: m["prices"]["rates"][0].__setitem__(1, 0), "prices name a roof that is not there"),
        (lambda m: m["prices"]["rates"][0].__setitem__(0, "__class__"), "prices name a roof that is not there"),
        (lambda m: m["truth"][0].pop(), "truth is not what it should be"),
        (lambda m: m["checked"].update(isas=3), "checked is not what it should be"),
        (lambda m: m["generation"].update(bos_token=None), "generation is not what it should be"),
        (lambda m: m["generation"].update(sampling={"temperature": "hot"}), "has a sampling that is none"),
        (lambda m: m["generation"].update(sampling={"seed": 1}), "has a sampling that is none"),
        (lambda m: m["generation"].update(outline=[["for", "m", [["for", "n", []]]]]), "generation is not what it"),
    ],
)
def test_manifests_that_lie(bundle: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    signed(bundle, change)
    with pytest.raises(BundleError, match=message):
        load(str(bundle))


@pytest.mark.parametrize(("field", "value"), [(4, 1 << 40), (4, -64), (3, 1 << 30), (2, 0), (0, "Q9_9"), (5, -1)])
def test_samples_of_the_truth_that_lie(bundle: Path, field: int, value: object) -> None:
    """Where a sample is compared with, a kernel reads."""
    signed(bundle, lambda m: (m["truth"][0].__setitem__(field, value), m["checked"].update(build="other")))
    with pytest.raises((BundleError, UnsupportedError), match=r"truth.bin does not fit|weight format 'Q9_9'"):
        load(str(bundle), text=False)


@pytest.mark.parametrize(("at", "value", "message"), FOREIGN_CODE)
def test_foreign_code(bundle: Path, at: int, value: int, message: str) -> None:
    raw = bytearray((bundle / "code.bin").read_bytes())
    struct.pack_into("<q", raw, at, value)
    (bundle / "code.bin").write_bytes(raw)
    with pytest.raises(BundleError, match=message):
        load(str(bundle))


def test_manifests_of_other_versions_and_changed_ones(bundle: Path) -> None:
    values = json.loads((bundle / "manifest.json").read_text())
    for change, message in (
        ({"format": 2}, "has format 2, this build reads format 3"),
        ({"name": "other"}, "was changed or is damaged"),
    ):
        (bundle / "manifest.json").write_text(json.dumps(values | change))
        with pytest.raises(BundleError, match=message):
            load(str(bundle))
    for text in ("", "[]", "{}", "nonsense", '{"format": 3}', '{"format": 3, "id": 5}'):
        (bundle / "manifest.json").write_text(text)
        with pytest.raises(BundleError):
            load(str(bundle))


def test_the_kernels_are_checked_unless_that_was_done_on_this_chip_with_this_build(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roofline.backends.cpu import truth

    asked: list[str] = []
    real = truth.check_samples
    monkeypatch.setattr(truth, "check_samples", lambda isa, base, found: (asked.append(isa), real(isa, base, found)))
    load(str(bundle), text=False)
    assert not asked
    for field, value in (("build", "other"), ("chip", "other"), ("isas", [])):
        opened = open_bundle(bundle)
        checked = dict(opened.manifest.checked) | {field: value}
        object.__setattr__(opened.manifest, "checked", checked)
        monkeypatch.setattr("roofline.bundle.sources.open_bundle", lambda path, opened=opened: opened)
        load(str(bundle), text=False)
    assert asked == [native.isas()[0]] * 3
    load(str(bundle), text=False, verify=False)
    assert len(asked) == 3
    raw = bytearray((bundle / "weights.bin").read_bytes())
    raw[100] ^= 0x40
    (bundle / "weights.bin").write_bytes(raw)
    with pytest.raises(TruthError, match=r"kernels .* are wrong on"):
        load(str(bundle), text=False)


def test_a_step_is_as_large_as_keeps_the_backend_busy():
    from roofline.backends import table
    from roofline.backends.options import LoadOptions

    config = {"layers": 1, "kv_heads": 1, "head_dim": 32, "max_position": 64}

    def step_size(backend: str, **sizes: int) -> tuple[int, int]:
        options = LoadOptions(backend=backend, kv_cache_dtype="bf16", **sizes)
        limits = table.get(backend).capacity(options, config, 1).limits
        return limits.tokens, limits.segments

    assert [step_size(backend) for backend in ("cpu", "reference", "gpu")] == [(512, 64), (512, 64), (2048, 256)]
    assert step_size("gpu", max_batch_tokens=300) == (300, 256)
    assert step_size("cpu", max_running=200) == (512, 200)
