"""Files of models that lie or are damaged: what each reader says of them, in how much memory and time.

`python tests/weights/crafted_files.py --seconds 600 --seed 1 --subjects gguf,torch` tries each subject for so long in
child processes, and prints every try that was neither read nor refused with one of our errors in one line.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
os.environ["ROOFLINE_BUNDLES"] = "off"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from roofline.bundle.text_side import load_text, text_of_folder
from roofline.common.errors import RequestError, RooflineError
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.files.gguf import GGUFFile
from roofline.weights.files.gguf_writer import header
from roofline.weights.files.mapped import TensorInfo
from tests.crafting import Limits, Tally, change_bytes, change_json, in_children, report
from tests.weights import sound_files

LIMITS = Limits(seconds=20.0, grown=1 << 30)
MOST_SAID = 4000  # characters of an error
TEXT = "Hello world, it's 12345 naïve  texts\n\n\t日本 <s>x</s> \U0001f600"
_FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "F8_E4M3", "I8", "I32", "I64", "U8", "X")


def change_safetensors(data: bytes, random: Random) -> bytes:
    """Its header as JSON, its header as bytes, or the bytes of one tensor."""
    (length,) = struct.unpack_from("<Q", data)
    head, body = data[8 : 8 + length], data[8 + length :]
    how = random.random()
    if how < 0.5:
        values = json.loads(head)
        entry = random.choice(list(values))
        if random.random() < 0.3 and isinstance(values[entry], dict) and "dtype" in values[entry]:
            values[entry]["dtype"] = random.choice(_FORMATS)
        else:
            values = change_json(values, random)
        head = json.dumps(values).encode()
    elif how < 0.75:
        head = change_bytes(head, random)
        if random.random() < 0.3:
            length = random.choice((0, 1, length + 1, 1 << 31, (1 << 63) + 8, (1 << 64) - 1))
            return struct.pack("<Q", length) + head + body
    else:
        places = [v["data_offsets"] for v in json.loads(head).values() if "data_offsets" in v]
        start, stop = random.choice(places)
        inside = change_bytes(body[start:stop], random)[: stop - start]
        body = body[:start] + inside.ljust(stop - start, b"\0") + body[stop:]
    return struct.pack("<Q", len(head)) + head + body


def change_gguf(data: bytes, random: Random) -> bytes:
    """Its metadata or its table of tensors, written again, or its bytes."""
    how = random.random()
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        sound = GGUFFile(Path(file.name))
        metadata, infos = dict(sound.metadata), list(sound.tensors.values())
        body = b"".join(sound.read(info.name).tobytes().ljust(-(-info.nbytes // 32) * 32, b"\0") for info in infos)
    own = len(header(metadata, infos))
    if how < 0.55:
        keys = [key for key in metadata if not key.startswith("tokenizer.") or random.random() < 0.5]
        key = random.choice(keys or list(metadata))
        with contextlib.suppress(Exception):  # there is no type for it
            changed = change_json({key: metadata[key]}, random)
            return header({k: v for k, v in metadata.items() if k != key} | changed, infos) + body
    elif how < 0.75:
        at = random.randrange(len(infos))
        infos[at] = _changed_tensor(infos[at], infos, random)
        with contextlib.suppress(Exception):
            return header(metadata, infos if random.random() < 0.9 else infos[:at] + infos[at + 1 :]) + body
    elif how < 0.9:
        return change_bytes(data[:own], random) + body
    return data[:own] + change_bytes(body, random)


def _changed_tensor(info: TensorInfo, others: list[TensorInfo], random: Random) -> TensorInfo:
    name, form, shape, other = info.name, info.format, list(info.shape), random.choice(others)
    match random.randrange(4):
        case 0:
            name = random.choice((other.name, name + "x", "blk.99999." + name, name.replace("0", "1"), ""))
        case 1:
            form = random.choice(_FORMATS[:8])
        case 2:
            at = random.randrange(len(shape))
            shape[at] = random.choice((0, 1, shape[at] * 2, shape[at] + 32, 1 << 31, (1 << 63) + 1))
        case _:
            shape = random.choice((shape[::-1], [*shape, 1], [1, *shape], list(other.shape)))
    return TensorInfo(name, form, tuple(shape), info.nbytes)


def change_zip(data: bytes, random: Random) -> bytes:
    """The pickle inside, or the bytes of the file."""
    if random.random() < 0.25:
        return change_bytes(data, random)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith(("data.pkl", "byteorder", "version")):
                likely = item.filename.endswith("data.pkl") or random.random() < 0.1
                content = change_bytes(content, random) if likely else content
            elif random.random() < 0.02:
                content = content[: random.randrange(len(content) + 1)]
            new.writestr(item, content)
    return out.getvalue()


def change_file(path: Path, random: Random) -> None:
    """A file changed in the way of its kind, or cut off, emptied, taken away, or a folder in its place."""
    data, how = path.read_bytes(), random.random()
    path.unlink()
    if how < 0.02:
        return
    if how < 0.03:
        path.mkdir()
        return
    if how < 0.08:
        path.write_bytes(data[: random.randrange(len(data) + 1)])
        return
    kind = path.suffix
    if kind == ".json" and random.random() < 0.85:
        values = json.loads(data)
        for _ in range(random.choice((1, 1, 2, 3))):
            values = change_json(values, random)
        data = json.dumps(values).encode()
    elif kind == ".safetensors":
        data = change_safetensors(data, random)
    elif kind == ".gguf":
        data = change_gguf(data, random)
    elif kind == ".bin" and zipfile.is_zipfile(io.BytesIO(data)):
        data = change_zip(data, random)
    else:
        data = change_bytes(data, random)
    path.write_bytes(data)


def read_model(path: Path, random: Random) -> str:
    """Reads everything of a model, and now and then runs it."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors:
        values = checkpoint.dequantize(name)
        assert values.shape == checkpoint.tensors[name].shape, (values.shape, checkpoint.tensors[name])
    if random.random() < 0.25:
        _run(path)
    return "read"


def _run(path: Path) -> None:
    from roofline.bundle import load
    from roofline.ops.batch import Segment

    loaded = load(str(path), backend="cpu", threads=1, cache_tokens=64, max_model_len=64, text=False)
    length = min(20, loaded.executable.max_context)
    loaded.executable.batch.fill([Segment([1] * length, 0, [0, 1, 2])], [length - 1])
    loaded.executable.forward()
    loaded.executable.close()


def read_config(path: Path, random: Random) -> str:
    """A configuration, with tensors made up for it where it is no giant."""
    from roofline.models.registry import configure
    from roofline.weights import checkpoint, random_weights

    config = checkpoint.read_config(path / "config.json")
    _, cfg = configure(config)
    if cfg.layers > 16 or cfg.width > 1024 or cfg.ffn > 4096 or config["vocab"] > 4096:
        return "large"
    if getattr(cfg, "experts", 0) > 64 or cfg.heads * cfg.head_dim > 4096 or cfg.max_position > 1 << 20:
        return "large"
    made = random_weights.random_checkpoint(config, 0)
    from roofline.bundle import load

    load(made, backend="cpu", threads=1, cache_tokens=64, max_model_len=64, text=False).executable.close()
    return "read"


def read_tokenizer(path: Path, random: Random) -> str:
    """The tokenizer and the template of a folder, or of a GGUF file with the model's."""
    tokenizer, template = text_of_folder(path) if path.is_dir() else load_text(open_checkpoint(path))
    ids = tokenizer.encode(TEXT, add_special=True, parse_special=random.random() < 0.5)
    tokenizer.decode([*ids, 0, tokenizer.vocab_size - 1])
    tokenizer.from_bytes(tokenizer.to_bytes()).encode(TEXT, add_special=False)
    with contextlib.suppress(RequestError):  # it has no template
        template.encode_chat(tokenizer, [{"role": "user", "content": "Hello"}])
    return "read"


Read = Callable[[Path, Random], str]
# Subject -> what its sound files are made by, what reads them.
SUBJECTS: dict[str, tuple[Callable[[Path], Iterator[Path]], Read]] = {
    "gguf": (sound_files.ggufs, read_model),
    "gguf-parts": (sound_files.gguf_parts, read_model),
    "gguf-tokenizer": (sound_files.gguf_tokenizers, read_tokenizer),
    "safetensors": (sound_files.safetensors, read_model),
    "quantised": (sound_files.quantised, read_model),
    "torch": (sound_files.torch_pickles, read_model),
    "config": (sound_files.configs, read_config),
    "tokenizer": (sound_files.tokenizers, read_tokenizer),
    "older-tokenizer": (sound_files.older_tokenizers, read_tokenizer),
}


def craft(sound: Path, place: Path, random: Random, text: bool) -> Path:
    """A lying copy of a model's file or folder."""
    shutil.rmtree(place, ignore_errors=True)
    copy = place / sound.name
    if sound.is_dir():
        shutil.copytree(sound, copy)
    else:
        place.mkdir()
        shutil.copy(sound, copy)
    files = sorted(copy.iterdir()) if sound.is_dir() else [copy]
    if not text:
        files = [file for file in files if not file.name.startswith("tokenizer")] or files
    for file in random.sample(files, min(len(files), random.choice((1, 1, 1, 2)))):
        change_file(file, random)
    if copy.is_dir() and sound.name.startswith("parts"):
        return random.choice(sorted(copy.iterdir())) if random.random() < 0.5 and any(copy.iterdir()) else copy
    return copy


def attempts(subject: str, folder: Path, seed: int, tries: int, seconds: float) -> Tally:
    """What came of a subject."""
    make, read = SUBJECTS[subject]
    (folder / "sound").mkdir(parents=True)
    sound = list(make(folder / "sound"))
    for path in sound:
        read(path, Random(0))  # all of them are read as they are

    def attempt(index: int) -> str:
        random = Random(f"{seed} {subject} {index}")
        path = craft(random.choice(sound), folder / "crafted", random, "tokenizer" in subject)
        try:
            return read(path, random)
        except RooflineError as error:
            said = str(error)
            assert "\n" not in said, f"several lines: {said!r}"
            assert 10 < len(said) < MOST_SAID, f"{len(said)} characters: {said[:200]!r}"
            return "refused"

    return in_children(attempt, tries, seconds, LIMITS)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--tries", type=int, default=1 << 60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    options = parser.parse_args()
    logging.getLogger("roofline").setLevel(logging.ERROR)
    failures = 0
    for subject in options.subjects.split(","):
        with tempfile.TemporaryDirectory() as name:
            tally = attempts(subject, Path(name), options.seed, options.tries, options.seconds)
        failures += report({subject: tally})
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
