"""What is fed to a reader in place of its file is told in one line, with what to do about it."""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from roofline.bench.plan.fleet.spec import read_spec
from roofline.bench.traffic.traffic import read_traffic
from roofline.bundle.text_side import text_of_folder
from roofline.common.errors import ConfigError
from roofline.common.json_files import read_json_file
from roofline.common.mistaken_files import mistaken_for
from roofline.engine.receipts.receipt import read_answer
from roofline.train.data.record_files import records
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.safetensors import SafetensorsFile

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
OLLAMA = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab12", "size": 1}]}


def _zip() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("model.gguf", "GGUF")
    return content.getvalue()


def _all_records(path: Path) -> object:
    return list(records(path, None))


def _read_yaml(path: Path) -> object:
    pytest.importorskip("torch", reason="training is torch's")
    from roofline.train.config.read import read_config

    return read_config(path)


def _read_pickle(path: Path) -> object:
    pytest.importorskip("torch", reason="it reads them")
    from roofline.weights.files.torch_pickle import PickledModel

    (path.parent / "config.json").write_text("{}")
    return PickledModel(path.parent)


def _read_tokenizer(path: Path) -> object:
    return text_of_folder(path.parent)


def _read_batch(path: Path) -> object:
    from roofline.server.answer_file import Job, answer_file
    from roofline.server.options import ServeOptions

    return answer_file(ServeOptions(), Job(path, path.with_name("out"), None, 1), lambda progress: None)


def _read_weights(path: Path) -> object:
    return open_checkpoint(path)


MISTAKES = {
    "lfs": (LFS, "Git LFS pointer.*; run `git lfs pull` in its folder"),
    "page": (b"\n<!DOCTYPE html>\n<html><body>404</body></html>\n", "a page that a server sent.*; download it again"),
    "xml": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "a page that a server sent"),
    "zip": (_zip(), "zip archive; unpack it"),
    "gzip": (b"\x1f\x8b\x08\0\0\0\0\0", "gzip archive; unpack it"),
    "readme": (
        b"# A model\n\nThis is a README of a model.\n",
        "; (name|mend|get)|: name|take another|`roofline|plan.md",
    ),
    "empty": (b"", "is empty; get the file again"),
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gguf": ("model.gguf", GGUFFile),
    "safetensors": ("model.safetensors", SafetensorsFile),
    "pickle": ("pytorch_model.bin", _read_pickle),
    "weights": ("sha256-ab12", _read_weights),
    "json": ("config.json", read_json_file),
    "tokenizer": ("tokenizer.json", _read_tokenizer),
    "receipt": ("receipt.json", read_answer),
    "traffic": ("traffic.jsonl", read_traffic),
    "fleet": ("fleet.toml", read_spec),
    "yaml": ("run.yaml", _read_yaml),
    "batch": ("batch.jsonl", _read_batch),
    "jsonl": ("data.jsonl", _all_records),
    "parquet": ("data.parquet", _all_records),
    "text": ("data.txt", _all_records),
}
# What a reader takes, or tells in words of its own.
OTHERWISE = {("text", name) for name in ("page", "xml", "readme", "empty")} | {
    ("jsonl", "empty"), ("parquet", "empty"), ("pickle", "zip"), ("batch", "readme"),
}  # fmt: skip


CASES = [(reader, mistake) for reader in READERS for mistake in MISTAKES if (reader, mistake) not in OTHERWISE]


@pytest.mark.parametrize(("reader", "mistake"), CASES)
def test_a_mistaken_file_is_told_with_a_remedy(reader: str, mistake: str, tmp_path: Path) -> None:
    (name, read), (content, words) = READERS[reader], MISTAKES[mistake]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_in_place_of_a_file_is_told(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(ConfigError, match=name):
        read(path)


@pytest.mark.parametrize(
    ("reader", "content"),
    [
        ("gguf", b"GGUF" + struct.pack("<IQQ", 3, 5, 9) + b"\1\0"),
        ("gguf", b"GGUF\3\0"),
        ("safetensors", struct.pack("<Q", 500) + b'{"a": {'),
        ("safetensors", b"\1\0"),
        ("json", b'{"a": [1,'),
        ("pickle", b"PK\3\4abc"),
        ("receipt", b'{"version": 3, "cho'),
        ("parquet", b"PAR1abcd"),
        ("jsonl", b'{"messages": [{"role": "user", "con'),
    ],
)
def test_a_file_that_is_cut_off_is_to_be_got_again(reader: str, content: bytes, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"get (it|the file|the answer's file) again|take another copy"):
        read(tmp_path / name)


def test_a_manifest_of_ollama_names_the_file_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(json.dumps(OLLAMA))
    with pytest.raises(ConfigError, match=r"manifest of Ollama's; name the file .*, sha256-ab12 in the folder blobs"):
        open_checkpoint(tmp_path / "latest")


def test_files_that_are_what_they_should_be_are_no_mistakes(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"GGUF\3"), ("b.bin", _zip()), ("c.json", b"{}"), ("d.txt", b"version 1")):
        (tmp_path / name).write_bytes(content)
        assert mistaken_for(tmp_path / name) == ""
    assert mistaken_for(tmp_path) == mistaken_for("the body of a request") == ""
    (tmp_path / "page.html").write_text("<html>")
    assert mistaken_for(tmp_path / "page.html", may_be_page=True) == ""


def test_weights_without_a_configuration_name_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ConfigError, match=r"config\.json: there is no such file beside the weights; get it from"):
            open_checkpoint(place)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_may_not_be_read_is_told(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / name).chmod(0)
    with pytest.raises(ConfigError, match=r"permission|Permission"):
        read(tmp_path / name)
