"""libroofline with a model whose layers keep recurrent state: a slot for each answer, from zeros on."""

from pathlib import Path

import library_binding as lb
import numpy as np
import pytest
from library_binding import Library, sampling

import roofline._native as native
from roofline.backends.capacity import stores_of
from roofline.backends.cpu.backend import BACKEND
from roofline.backends.cpu.executable import CpuExecutable
from roofline.backends.cpu.memory import map_image
from roofline.backends.options import LoadOptions
from roofline.bundle.reader import open_bundle
from roofline.bundle.writer import write_bundle
from roofline.ops.batch import Segment
from tests.backends.hybrid_models import checkpoint, executable

LENGTH = 12
PROMPTS = [np.random.default_rng(number).integers(0, 200, 5 + 9 * number).tolist() for number in range(5)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "bundle"
    write_bundle(checkpoint("plain", "Q8_0"), path, threads=1)
    return path


def greedy(model: CpuExecutable, prompt: list[int]) -> list[int]:
    """The answer alone: the prompt at once, then token by token."""
    answer: list[int] = []
    ids, first = prompt, 0
    while len(answer) < LENGTH:
        model.batch.fill([Segment(ids, first, list(range(8)))], [len(ids) - 1])
        model.forward()
        answer.append(int(model.logits()[0].argmax()))
        ids, first = answer[-1:], first + len(ids)
    return answer


def answers(library: Library, bundle: Path, **options: int) -> list[list[int]]:
    handle = library.open(bundle, **options)
    made = sampling(temperature=0, max_tokens=LENGTH, ignore_eos=1)
    numbers = [library.submit(handle, prompt, made) for prompt in PROMPTS]
    events = library.run(handle)
    library.close(handle)
    assert all(events[number][-1].finish == lb.LENGTH for number in numbers)
    return [[event.id for event in events[number]] for number in numbers]


def test_a_bundle_says_what_its_layers_keep(bundle: Path) -> None:
    opened, plain = open_bundle(bundle), executable(checkpoint("plain", "Q8_0"), native.isas()[0])
    assert stores_of(opened.manifest.config) == (1, plain.slot_bytes)
    options = LoadOptions(kv_cache_dtype="bf16", threads=2, max_running=3)
    capacity = BACKEND.capacity(options, opened.manifest.config, 1)
    made, _ = BACKEND.make_from_bundle(
        opened, map_image(bundle / "weights.bin", opened.lowered.nbytes), options, capacity
    )
    assert [greedy(made, prompt) for prompt in PROMPTS] == [greedy(plain, prompt) for prompt in PROMPTS]
    assert (made.slot_bytes, made.page_bytes) == (plain.slot_bytes, plain.page_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1, "max_sequences": 1},
        {"threads": 2, "max_step_tokens": 7, "max_sequences": 3},
        {"threads": 2, "cache_tokens": 112, "max_length": 64, "max_step_tokens": 16},  # some are pre-empted
    ],
)
def test_answers_are_those_of_each_alone(library: Library, bundle: Path, options: dict[str, int]) -> None:
    model = executable(checkpoint("plain", "Q8_0"), native.isas()[0])
    assert answers(library, bundle, **options) == [greedy(model, prompt) for prompt in PROMPTS]


def test_a_model_of_state_alone_is_answered(library: Library, tmp_path: Path) -> None:
    source = checkpoint("scans alone")
    write_bundle(source, tmp_path / "bundle", threads=1)
    model = executable(source, native.isas()[0])
    assert model.page_bytes == 0
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert (
        answers(library, tmp_path / "bundle", threads=2, max_sequences=3, cache_tokens=112, max_length=64) == expected
    )
