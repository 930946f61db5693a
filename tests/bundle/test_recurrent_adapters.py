"""Adapters of models with recurrent state on the cpu backend: the bits of an answer are those of its own adapter,
whatever is computed beside it, and a snapshot is found under the adapter that it was computed with alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the model comes from transformers")
pytest.importorskip("transformers", reason="it makes the model")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.bundle import load
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from roofline.ops.adapters import AdapterMatrix
from roofline.ops.batch import Segment, StateMove
from roofline.weights.adapter_files import write_adapter
from roofline.weights.adapter_merge import merged
from roofline.weights.adapters import read_adapter
from roofline.weights.checkpoint import open_checkpoint
from tests.adapter_files import for_checkpoint
from tests.bundle.recurrent_models import write_recurrent
from tests.bundle.test_recurrent_answers import GUESSING, answers, engine_of
from tests.models.parity_cases import CASES, theirs

SIZES: dict[str, Any] = {"cache_tokens": 2048, "max_model_len": 256, "threads": 1, "max_adapters": 2}
PLACES: dict[str, Any] = {"max_adapters": 2}
PROMPT = np.random.default_rng(3).integers(0, 255, 150).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, digests=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("adapted") / "model")


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of all matrices of the layers."""
    place, base = tmp_path_factory.mktemp("adapters"), open_checkpoint(model)
    return [write_adapter(place / str(seed), base.config, for_checkpoint(base.tensors, seed)) for seed in (1, 2)]


def test_bits_are_those_of_the_reference_and_logits_those_of_the_merged_model(model: Path, folders: list[Path]) -> None:
    adapters, base = [read_adapter(folder).matrices for folder in folders], open_checkpoint(model)
    ids = [(slot, PROMPT[slot : slot + 20]) for slot in (1, 0, 2)]
    rows = []
    for backend in ("cpu", "reference"):
        executable = load(str(model), **SIZES, backend=backend, text=False).executable
        for slot, matrices in enumerate(adapters, 1):
            executable.adapters.set(slot, matrices)
        segments = [
            Segment(part, 0, [2 * slot, 2 * slot + 1], slot, StateMove(target=slot, save_at=0)) for slot, part in ids
        ]
        executable.batch.fill(segments, range(60))
        executable.forward()
        rows.append(np.array(executable.logits()))
    assert rows[0].tobytes() == rows[1].tobytes()
    for at, (slot, part) in enumerate(ids):
        source = merged(base, adapters[slot - 1]).checkpoint if slot else base
        alone = load(source, backend="reference", arithmetic="plain", cache_tokens=64, max_model_len=64, text=False)
        alone.executable.batch.fill([Segment(part, 0, range(2))], range(20))
        alone.executable.forward()
        expected = np.array(alone.executable.logits())
        difference = np.abs(rows[0][20 * at : 20 * at + 20] - expected).max()
        assert difference < 0.02 * expected.std()  # the core rounds keys and values to bf16


@pytest.mark.parametrize("name", ["mamba", "gemma3n"])
def test_matrices_that_read_what_others_give_or_are_multiplied_with_twice(name: str, tmp_path: Path) -> None:
    """Mamba's steps are made by two matrices, one behind the other; a layer of Gemma 3n multiplies with one twice."""
    theirs(CASES[name].config).save_pretrained(tmp_path / "model")
    rows, ids, generator = [], [id % 96 for id in PROMPT[:20]], np.random.default_rng(5)
    for backend in ("cpu", "reference"):
        executable = load(str(tmp_path / "model"), **SIZES, backend=backend, text=False).executable
        if not rows:
            shapes = {tensor: (site.inputs, site.outputs) for tensor, site in executable.adapters.sites.items()}
            drawn = {
                tensor: [0.2 * generator.standard_normal((3, n)).astype(np.float32) for n in sizes]
                for tensor, sizes in shapes.items()
            }
        executable.adapters.set(1, [AdapterMatrix(tensor, a, b, 0.75) for tensor, (a, b) in drawn.items()])
        for slot in (0, 1):
            executable.batch.fill([Segment(ids, 0, [0, 1], slot, StateMove(target=0, save_at=0))], range(20))
            executable.forward()
            rows.append(np.array(executable.logits()))
    assert rows[0].tobytes() == rows[2].tobytes()
    assert rows[1].tobytes() == rows[3].tobytes()
    assert np.abs(rows[0] - rows[1]).max() > 0.05


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "together, in chunks": ({}, {"max_batch_tokens": 23}),
    "guessing": (GUESSING, {}),
    "few slots and pages": (GUESSING, {"state_slots": 5, "max_running": 3, "cache_tokens": 384}),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_of_several_adapters_together_are_those_of_each_alone(
    model: Path, folders: list[Path], way: str
) -> None:
    engine = engine_of(model, EngineConfig(prefix_cache=False, **PLACES), **SIZES)
    names = ["", *(engine.adapters.load(str(folder)).digest for folder in folders)]
    texts = [PROMPT[:70], PROMPT[:129]]
    requests = [(text, name) for text in texts for name in names]
    alone = [answers(engine, [text], GREEDY, [name])[0] for text, name in requests]
    assert len({ids for ids, _ in alone}) == len(requests)
    config, options = WAYS[way]
    engine = engine_of(model, EngineConfig(**PLACES, **config), **{**SIZES, **options})
    for folder in folders:
        engine.adapters.load(str(folder))
    together = [text for text, _ in requests], GREEDY, [name for _, name in requests]
    assert answers(engine, *together) == alone
    hits = engine.state.snapshot_hits
    assert answers(engine, *together) == alone
    assert engine.state.snapshot_hits > hits or "state_slots" in options


def test_a_snapshot_is_found_under_its_own_adapter_alone(model: Path, folders: list[Path]) -> None:
    engine = engine_of(model, EngineConfig(**PLACES), **SIZES)
    one, two = (engine.adapters.load(str(folder)).digest for folder in folders)
    found = []
    for name in ("", one, two, two, "", one):
        before = engine.state.prefix_hits
        answers(engine, [PROMPT], GREEDY, [name])
        found.append(engine.state.prefix_hits - before)
    assert found == [0, 0, 0, 128, 128, 128]
    engine.adapters.unload(one)
    engine.adapters.load(str(folders[0]))  # into the same place
    before = engine.state.snapshot_hits
    answers(engine, [PROMPT], GREEDY, [one])
    assert engine.state.snapshot_hits == before + 1, "of the same adapter"
