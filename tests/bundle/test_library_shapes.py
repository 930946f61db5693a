"""Bundles of models whose layers keep keys of several shapes, opened from Python and by libroofline."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from library_binding import Library, sampling

from roofline.backends.capacity import BY_LAYER
from roofline.backends.cpu.backend import BACKEND
from roofline.backends.cpu.executable import CpuExecutable
from roofline.backends.cpu.memory import map_image
from roofline.backends.options import LoadOptions
from roofline.bundle.manifest import BundleError
from roofline.bundle.reader import open_bundle, verify
from roofline.bundle.writer import write_bundle
from roofline.ops.batch import Segment
from tests.backends.shaped_models import checkpoint
from tests.backends.test_cpu_shapes import executable

LENGTH = 8
PROMPTS = [np.random.default_rng(number).integers(0, 200, 5 + 9 * number).tolist() for number in range(3)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("shaped") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roofline.backends.capacity.BY_LAYER", (*BY_LAYER, "wide"))
        write_bundle(checkpoint("sharing", "Q8_0"), path, threads=1)
        yield path


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


def test_an_opened_bundle_gives_the_answers_of_its_source(bundle: Path) -> None:
    opened, plain = verify(bundle), executable(checkpoint("sharing", "Q8_0"))
    options = LoadOptions(kv_cache_dtype="bf16", threads=2, max_running=3)
    capacity = BACKEND.capacity(options, opened.manifest.config, 1)
    image = map_image(bundle / "weights.bin", opened.lowered.nbytes)
    made, _ = BACKEND.make_from_bundle(opened, image, options, capacity)
    assert made.page_bytes == plain.page_bytes
    assert [greedy(made, prompt) for prompt in PROMPTS] == [greedy(plain, prompt) for prompt in PROMPTS]
    assert opened.program().kv_groups == plain.program.kv_groups


def test_a_configuration_that_says_other_sizes_than_the_code_is_refused(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roofline.backends.capacity.BY_LAYER", BY_LAYER)  # as if all layers were alike
    with pytest.raises(BundleError, match="are of two models"):
        open_bundle(bundle)


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 2, "max_step_tokens": 7, "max_sequences": 3}])
def test_libroofline_gives_the_same_answers(library: Library, bundle: Path, options: dict[str, int]) -> None:
    plain = executable(checkpoint("sharing", "Q8_0"))
    handle = library.open(bundle, **options)
    made = sampling(temperature=0, max_tokens=LENGTH, ignore_eos=1)
    numbers = [library.submit(handle, prompt, made) for prompt in PROMPTS]
    events = library.run(handle)
    library.close(handle)
    assert [[event.id for event in events[n]] for n in numbers] == [greedy(plain, prompt) for prompt in PROMPTS]
