"""MPT in its forms, from a folder as Hugging Face writes it: ids, logits, bundles, and what is refused."""

import json
import zlib
from pathlib import Path
from typing import Any

import library_binding as lb
import numpy as np
import pytest
from bundle_models import MPT, write_model, write_mpt
from library_binding import Library, sampling

import roofline._native as native
from roofline.bundle import compile_model, load
from roofline.bundle.manifest import _digest
from roofline.bundle.reader import open_bundle
from roofline.common.errors import CapacityError, ConfigError
from roofline.engine.config import EngineConfig
from roofline.engine.llm import LLM
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.ops.batch import Segment

FORMS = tuple(MPT)


# Learned positions are a table that is added to the embeddings: test_cpu_program.py has steps of such a model.
@pytest.fixture(params=[pytest.param(form, marks=[pytest.mark.slow] * (form == "learned")) for form in FORMS])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(form: str, tmp_path: Path) -> Path:
    return write_mpt(tmp_path / form, form)


def asked() -> list[tuple[list[int], SamplingParams]]:
    """Prompts, two with a common beginning, over several pages and chunks."""
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 256, 33).tolist()
    prompts = [[*shared, 7], [*shared, 9, 11], *(rng.integers(0, 256, n).tolist() for n in (1, 70))]
    chosen = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8})
    return [
        (ids, SamplingParams(seed=i, max_tokens=6 + i, ignore_eos=True, **chosen[i % 2]))
        for i, ids in enumerate(prompts)
    ]


class Rows:
    """An executable that keeps the bits of each logit row by (seed, position)."""

    def __init__(self, executable: Any) -> None:
        self.inner, self.bits = executable, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(self, rows: Any) -> Any:
        for row, *key in zip(self.inner.logits(), rows.seed.tolist(), rows.position.tolist(), strict=True):
            assert self.bits.setdefault(tuple(key), row.tobytes()) == row.tobytes(), key
        return self.inner.sample(rows)


def answers(executable: Any, at_once: bool, **config: Any) -> dict[str, list[int]]:
    engine, ids = LocalEngine(executable, EngineConfig(**config)), {}
    for i, (prompt, params) in enumerate(asked()):
        engine.submit(prompt, params, request_id=str(i))
        while engine.has_work and not (at_once and i + 1 < len(asked())):
            for event in engine.step():
                assert event.error is None
                ids.setdefault(event.request_id, []).extend(event.ids)
    return ids


def test_ids_are_those_of_the_reference_and_no_bit_depends_on_company(model: Path) -> None:
    pytest.importorskip("torch", reason="the reference runs on torch")
    options: dict[str, Any] = {"text": False, "cache_tokens": 1024, "max_model_len": 200}
    wanted = answers(load(str(model), backend="reference", **options).executable, False, prefix_cache=False)
    rows = Rows(load(str(model), threads=1, **options).executable)
    assert answers(rows, False, prefix_cache=False) == wanted
    for isa in native.isas():
        rows.inner = load(str(model), isa=isa, threads=2, **options).executable
        assert answers(rows, True, max_batch_tokens=16, prefix_cache=True, speculate="ngram") == wanted


def test_logits_are_close_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="it is what the logits are compared with")
    import torch

    path, ids = write_mpt(tmp_path / "model", "alibi"), np.random.default_rng(1).integers(0, 300, 150)
    theirs = transformers.MptForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)[None]).logits[0].numpy()
    got, wanted = logits(load(str(path), text=False), ids.tolist()), wanted[-50:]
    assert wanted.std() > 0.5
    assert np.abs(got - wanted).max() < 0.03 * wanted.std()  # attention's operands are rounded to bf16


def logits(model: Any, ids: list[int]) -> np.ndarray:
    """float32 [positions, vocab] of the last fifty at most."""
    executable = model.executable
    executable.batch.fill([Segment(ids, 0, range(-(-len(ids) // 16)))], range(max(0, len(ids) - 50), len(ids)))
    executable.forward()
    return np.array(executable.logits())


def test_a_bundle_answers_as_its_source_with_python_and_without(model: Path, library: Library, tmp_path: Path) -> None:
    path, ids = compile_model(str(model), tmp_path / "bundle").path, list(range(70))
    one, two = load(str(path)), load(str(model))
    assert one.config == two.config
    assert one.executable.fingerprint == two.executable.fingerprint
    assert logits(one, ids).tobytes() == logits(two, ids).tobytes()
    int8 = [load(str(source), text=False, kv_cache_dtype="int8") for source in (path, model)]
    assert logits(int8[0], ids).tobytes() == logits(int8[1], ids).tobytes() != logits(one, ids).tobytes()
    with LLM(str(path)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        wanted = llm.generate([ids], params)[0].ids
    handle = library.open(path, threads=2)
    library.submit(handle, ids, sampling(temperature=0, max_tokens=12, ignore_eos=1))
    (events,) = library.run(handle).values()
    assert [event.id for event in events] == wanted
    library.close(handle)


def test_the_library_refuses_a_table_with_fewer_rows_than_positions(library: Library, tmp_path: Path) -> None:
    path = compile_model(str(write_mpt(tmp_path / "model", "learned")), tmp_path / "bundle").path
    raw = (path / "code.bin").read_bytes()
    numbers = np.frombuffer(raw, "<i8", len(raw) // 8).copy()
    (at,) = (i for i in range(40, len(numbers) - 1) if tuple(numbers[i : i + 2]) == (512, 64))  # rows and columns
    for rows, wanted in ((511, lb.BUNDLE), (512, lb.OK)):
        numbers[at] = rows
        numbers[6] = zlib.crc32(numbers.tobytes()[56:])
        (path / "code.bin").write_bytes(numbers.tobytes())
        if wanted == lb.OK:
            library.close(library.open(path))
        else:
            assert library.refused(path) == (
                wanted,
                f"{path} is a bundle that cannot be used: code.bin: operation 1 (embed_positions): "
                f"pieces have fewer rows than there are positions. Compile it again: roofline compile MODEL -o {path}",
            )


def test_a_manifest_has_the_fields_of_its_family_alone(tmp_path: Path) -> None:
    bundle = compile_model(str(write_model(tmp_path / "llama")), tmp_path / "bundle").path
    held = open_bundle(bundle).manifest.config
    assert not {"positions", "bias"} & set(held)
    assert (load(str(bundle)).config.positions, load(str(bundle)).config.bias) == ("rope", False)
    written = json.loads((bundle / "manifest.json").read_text())
    written["config"] |= {"positions": "rope", "bias": False}
    written["id"] = _digest(written | {"id": ""})
    (bundle / "manifest.json").write_text(json.dumps(written))
    assert load(str(bundle)).config.positions == "rope"
    mpt = compile_model(str(write_mpt(tmp_path / "mpt", "learned")), tmp_path / "other").path
    assert open_bundle(mpt).manifest.config["positions"] == "learned"
    assert load(str(mpt)).config.bias


def test_positions_that_were_never_learned_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=513 is not between 1 and the model's 512 positions"):
        load(str(model), max_model_len=513)
    loaded = load(str(model), text=False)
    assert loaded.executable.max_context == 512
    engine = LocalEngine(loaded.executable)
    with pytest.raises(CapacityError, match="512"):
        engine.submit([1] * 512, SamplingParams(max_tokens=1))
    engine.submit([1] * 500, SamplingParams(temperature=0, ignore_eos=True))
    count = 0
    while engine.has_work:
        count += sum(len(event.ids) for event in engine.step())
    assert count == 12


def test_a_configuration_alone_runs_on_random_weights(form: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MPT[form]))
    for weights in ("random:1", "random:1:Q4_1"):
        loaded = load(str(tmp_path), weights=weights, text=False)
        assert np.isfinite(logits(loaded, list(range(20)))).all()
    with pytest.raises(ConfigError, match="preset:mpt-125m is a shape without weights"):
        load("preset:mpt-125m")
