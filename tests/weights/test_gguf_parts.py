"""GGUF models in several files: found from any part, checked against each other, refused by file and field."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_builders import I32, STRING, U32, GGUFBuilder, tiny_llama

from roofline.bundle.bundle_cache import key_of
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.files.gguf_parts import GGUFModel, part_names

COUNT = 3


def builders(form: str = "Q4_0", count: int = COUNT) -> list[GGUFBuilder]:
    """The tiny model in parts, with its tensors in their order."""
    whole = tiny_llama(form)
    parts = []
    for number, tensors in enumerate(np.array_split(np.arange(len(whole.tensors)), count)):
        part = GGUFBuilder()
        part.pairs = list(whole.pairs) if number == 0 else []
        part.pairs += [
            ("split.no", U32, number),
            ("split.count", U32, count),
            ("split.tensors.count", I32, len(whole.tensors)),
        ]
        end = 0
        for index in tensors:
            name, shape, kind, _, raw = whole.tensors[index]
            part.tensors.append([name, shape, kind, end, raw])
            end = -(-(end + len(raw)) // 32) * 32
        parts.append(part)
    return parts


def save(folder: Path, parts: list[GGUFBuilder], name: str = "tiny") -> list[Path]:
    paths = [folder / f"{name}-{n + 1:05d}-of-{len(parts):05d}.gguf" for n in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.build())
    return paths


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        GGUFModel(path)
    return str(error.value)


@pytest.mark.parametrize("form", ["Q4_0", "Q5_0", "MXFP4"])
def test_any_part_and_the_folder_open_the_model_that_one_file_has(form: str, tmp_path: Path) -> None:
    paths = save(tmp_path, builders(form))
    single = tmp_path / "whole" / "model.gguf"
    single.parent.mkdir()
    single.write_bytes(tiny_llama(form).build())
    whole = open_checkpoint(single)
    for path in (*paths, tmp_path):
        model = open_checkpoint(path)
        assert model.config == whole.config
        assert model.tensors == whole.tensors
        assert all(np.array_equal(model.read(name), whole.read(name)) for name in whole.tensors)


def test_parts_are_named_as_the_first_is(tmp_path: Path) -> None:
    first = tmp_path / "a-00001-of-00002-00002-of-00003.gguf"
    assert [path.name for path in part_names(first)] == [f"a-00001-of-00002-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for other in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-1-of-3.gguf", "a-00001-of-00003.bin"):
        assert part_names(tmp_path / other) == [tmp_path / other]


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = save(tmp_path, builders())
    paths[1].unlink()
    assert "missing beside it: tiny-00002-of-00003.gguf" in refusal(paths[2])
    paths[0].unlink()
    assert "tiny-00001-of-00003.gguf, tiny-00002-of-00003.gguf" in refusal(paths[2])


@pytest.mark.slow
def test_of_many_missing_parts_eight_are_named(tmp_path: Path) -> None:
    part = builders()[0]
    part.pairs = [(key, kind, 99_999 if key == "split.count" else value) for key, kind, value in part.pairs]
    path = tmp_path / "tiny-00001-of-99999.gguf"
    path.write_bytes(part.build())
    said = refusal(path)
    assert said.endswith("tiny-00009-of-99999.gguf and 99990 more")
    assert len(said) < 600


def test_a_part_of_another_name_says_what_it_must_be_called(tmp_path: Path) -> None:
    path = save(tmp_path, builders())[0]
    renamed = path.rename(tmp_path / "model.gguf")
    assert "it is one of 3 parts, so its name must end in -NNNNN-of-00003.gguf" in refusal(renamed)


def _replaced(parts: list[GGUFBuilder], number: int, key: str, value: object) -> None:
    parts[number].pairs = [(k, kind, value if k == key else old) for k, kind, old in parts[number].pairs]


def _other_count(parts: list[GGUFBuilder]) -> None:
    _replaced(parts, 1, "split.count", 2)


def _other_number(parts: list[GGUFBuilder]) -> None:
    _replaced(parts, 1, "split.no", 2)


def _no_number(parts: list[GGUFBuilder]) -> None:
    parts[1].pairs = [pair for pair in parts[1].pairs if pair[0] != "split.no"]


def _other_total(parts: list[GGUFBuilder]) -> None:
    _replaced(parts, 2, "split.tensors.count", 99)


def _other_model(parts: list[GGUFBuilder]) -> None:
    parts[1].pairs.append(("general.architecture", STRING, "qwen2"))


def _twice(parts: list[GGUFBuilder]) -> None:
    end = parts[1].tensors[-1]
    parts[1].tensors.append([parts[0].tensors[0][0], end[1], end[2], end[3] + len(end[4]), end[4]])


def _too_few(parts: list[GGUFBuilder]) -> None:
    parts[1].tensors.pop()


SPOILED = {
    "count": (_other_count, "00002-of-00003.gguf: split.count: is 2, but its name and tiny-00001"),
    "number": (_other_number, "00002-of-00003.gguf: split.no: is 2, but by its name this is part 1"),
    "no number": (_no_number, "00002-of-00003.gguf: split.no: is missing"),
    "total": (_other_total, "00003-of-00003.gguf: split.tensors.count: differs from that of tiny-00001-of-00003.gguf"),
    "model": (_other_model, "00002-of-00003.gguf: general.architecture: differs"),
    "tensor twice": (_twice, "tensor 'token_embd.weight': is in tiny-00001-of-00003.gguf too"),
    "too few": (_too_few, "split.tensors.count: the model has 20 tensors, its parts have 19"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_parts_that_do_not_belong_together_are_refused(what: str, tmp_path: Path) -> None:
    spoil, said = SPOILED[what]
    parts = builders()
    spoil(parts)
    paths = save(tmp_path, parts)
    for path in (paths[0], paths[2]):
        assert said in refusal(path)


def test_two_models_in_a_folder_are_not_taken_for_one(tmp_path: Path) -> None:
    save(tmp_path, builders(), "a")
    save(tmp_path, builders(), "b")
    with pytest.raises(ConfigError, match="holds 6 GGUF files; name one"):
        open_checkpoint(tmp_path)


def test_a_bundle_in_the_cache_is_of_all_parts(tmp_path: Path) -> None:
    paths = save(tmp_path, builders())
    before = key_of(paths[0])
    assert key_of(paths[0]) == before
    paths[2].write_bytes(paths[2].read_bytes() + b"\0")
    assert key_of(paths[0]) != before


GOOD = [part.build() for part in builders("Q5_1")]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, COUNT - 1),
            st.integers(0, 700),
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\0\0\0\x80"])),
        ),
        min_size=1,
        max_size=4,
    ),
    opened=st.integers(0, COUNT - 1),
)
def test_mutated_parts_never_crash(edits: list[tuple[int, int, bytes]], opened: int, tmp_path: Path) -> None:
    contents = [bytearray(part) for part in GOOD]
    for part, place, raw in edits:
        contents[part][place : place + len(raw)] = raw
    paths = [tmp_path / f"tiny-{n + 1:05d}-of-{COUNT:05d}.gguf" for n in range(COUNT)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    with contextlib.suppress(ConfigError, UnsupportedError):
        open_checkpoint(paths[opened])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=st.integers(0, COUNT - 1), share=st.floats(0, 0.999))
def test_truncated_parts_are_refused(part: int, share: float, tmp_path: Path) -> None:
    paths = save(tmp_path, builders())
    whole = paths[part].read_bytes()
    paths[part].write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError):
        open_checkpoint(paths[0])
