"""The reference of golden prompts: from the original file, computed once, bounded."""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roofline.bundle import golden, load
from roofline.bundle.bundle_cache import entries
from roofline.bundle.golden import GoldenTask, forget_packed, logits_of, original, reference_logits
from roofline.common.errors import RooflineError, UnsupportedError


@pytest.fixture
def task(model: Path, home: Path) -> GoldenTask:
    return GoldenTask(str(model), None, [list(range(20)), [5, 6, 7]], [[0, 15, 19], [2]])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[GoldenTask]:
    """The tasks that were computed, in this process instead of another."""
    done: list[GoldenTask] = []

    async def computed(task: GoldenTask) -> bytes:
        import io

        done.append(task)
        file = io.BytesIO()
        np.save(file, logits_of(task))
        return file.getvalue()

    monkeypatch.setattr(golden, "_computed", computed)
    return done


def reference(task: GoldenTask) -> np.ndarray:
    return asyncio.run(reference_logits(task))


def test_it_is_computed_once_for_a_file_and_its_prompts(
    task: GoldenTask, runs: list[GoldenTask], model: Path, home: Path
) -> None:
    first = reference(task)
    assert first.shape == (4, 300)
    np.testing.assert_array_equal(reference(task), first)
    assert len(runs) == 1
    other = reference(replace(task, rows=[[0], [2]]))
    np.testing.assert_allclose(other, first[[0, 3]], atol=1e-5)
    os.utime(model / "model.safetensors", (1, 1))  # another file, as far as can be told without reading it
    reference(task)
    assert len(runs) == 3
    for file in (home / "golden").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    np.testing.assert_array_equal(reference(task), first)
    assert len(runs) == 4, "a damaged file is computed again"


def test_few_are_kept(task: GoldenTask, runs: list[GoldenTask], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "KEPT", 2)
    for row in range(4):
        reference(replace(task, rows=[[row], [2]]))
    assert len(list((home / "golden").iterdir())) == 2


def test_the_original_of_a_bundle_is_what_it_was_compiled_from(home: Path, model: Path, bundle: Path) -> None:
    assert original(str(model)) == str(model)
    assert original(str(bundle)) == str(model)
    assert original("preset:tiny") == "preset:tiny"
    model.rename(model.with_name("elsewhere"))
    with pytest.raises(UnsupportedError, match=r"what it was compiled from, .*model, is not here"):
        original(str(bundle))
    shutil.rmtree(home)
    with pytest.raises(UnsupportedError, match="it was compiled elsewhere"):
        original(str(bundle))


def test_packed_weights_are_forgotten(model: Path, home: Path) -> None:
    forget_packed(str(model))  # there are none yet
    load(str(model), text=False)
    assert len(list(entries())) == 1
    forget_packed(str(model))
    assert list(entries()) == []
    forget_packed("preset:tiny")


@pytest.mark.slow
def test_a_process_of_its_own_computes_the_same(task: GoldenTask) -> None:
    np.testing.assert_allclose(reference(task), logits_of(task), atol=1e-5)


@pytest.mark.slow
def test_what_the_process_says_is_the_reason(task: GoldenTask) -> None:
    with pytest.raises(RooflineError, match="nowhere"):
        reference(replace(task, source="/nowhere"))
