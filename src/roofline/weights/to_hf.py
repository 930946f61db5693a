"""Writes a model in Hugging Face's layout: config.json and safetensors, which transformers and we load."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import write_atomically
from roofline.models.registry import configure
from roofline.models.spec import Param
from roofline.weights.config import hf
from roofline.weights.families.shared.joined_experts import side_by_side
from roofline.weights.families.table import MODEL_TYPES, files_of
from roofline.weights.files.mapped import JsonObject
from roofline.weights.files.safetensors import INDEX
from roofline.weights.hf_order import HfOrder
from roofline.weights.hf_values import as_theirs, hf_shape
from roofline.weights.joined_rows import RowsTogether
from roofline.weights.names import to_hf

Row = tuple[str, tuple[int, ...], bytes]  # name, shape and little-endian bytes of a tensor that is written
FILE_BYTES = 5 << 30  # of weights in a file
_WORDS = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}  # what a number of each lies in
_SPELLED = ("norm_eps", "scan_eps", "rope_theta")  # which GGUF files hold as float32
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def hf_config(config: JsonObject, dtype: str = "F32") -> dict[str, object]:
    """The config.json of a canonical configuration, which `config.hf.from_hf` reads back as the same."""
    family = config["family"]
    if family not in MODEL_TYPES.values():
        raise ConfigError(f"a {family} model has no config.json that others read")
    common = {"tie_word_embeddings": config["tied"], "torch_dtype": _DTYPES[dtype]}
    return common | files_of(family).to_hf(dict(config))


def checked_hf_config(config: JsonObject, dtype: str) -> tuple[dict[str, object], str]:
    """As `hf_config`, and the order of the rows of q and k in such files. Raises UnsupportedError where it would be
    read back as another configuration.

    config: its epsilons and rope_theta may be float32 numbers, whose shortest spelling is written.
    """
    spelled = {name: float(str(np.float32(config[name]))) for name in _SPELLED if name in config}
    values = hf_config({**config, **spelled}, dtype)
    read = hf.from_hf(Path("config.json"), values)
    (_, before), (_, after) = configure({**config, **spelled, "rope_style": read["rope_style"]}), configure(read)
    for name, value in vars(before).items():
        if getattr(after, name) != value:
            what = f"{name} = {value!r} in a config.json"
            raise UnsupportedError(what, f"it would be read back as {getattr(after, name)!r}", ("GGUF",))
    return values, str(read["rope_style"])


def write_folder(
    folder: Path,
    config: JsonObject,
    tensors: Iterable[tuple[str, tuple[int, ...], bytes | np.ndarray]],
    dtype: str,
    other_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model into a new folder, which is complete once it exists.

    Args:
        tensors: canonical name, shape and little-endian bytes of `dtype` ("F32", "BF16", "F16"), in the order of the
            family's table; experts one below the other, which are written as a tensor each, or as the family's are.
            Rows and heads lie as the configuration says, and are written as Hugging Face has them.
        other_files: further files of the folder, such as the tokenizer's.

    Raises ConfigError where the folder is there already.
    """
    if folder.exists():
        raise ConfigError(f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in (other_files or {}).items():
            write_atomically(part / name, data)
        fields = hf_config(config, dtype)
        write_atomically(part / "config.json", json.dumps(fields, indent=1) + "\n")
        _write_tensors(part, _theirs(config, HfOrder(config, fields), tensors, dtype), dtype)
        part.chmod(0o755)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _theirs(
    config: JsonObject,
    order: HfOrder,
    tensors: Iterable[tuple[str, tuple[int, ...], bytes | np.ndarray]],
    dtype: str,
) -> Iterator[Row]:
    """The tensors as Hugging Face's files have them. A part of one is kept until the others have come."""
    family, experts = config["family"], config.get("experts", 0)
    table = files_of(family).NAMES
    parts: dict[str, dict[int, np.ndarray]] = {}
    in_rows = RowsTogether(config)
    for name, shape, values in tensors:
        data = order.of(name, shape, values if isinstance(values, bytes) else values.tobytes())
        if in_rows.has(name):
            together = in_rows.add(name, np.frombuffer(data, np.uint8).reshape(shape[0], -1))
            if together is not None:
                theirs, rows = together
                yield to_hf(family, theirs), hf_shape(config, theirs, (len(rows), *shape[1:])), rows.tobytes()
            continue
        place = table.hf_placed(config, to_hf(family, name))
        if place is None:
            for own, each, part in _by_expert(name, shape, data, 0 if table.is_stacked(name) else experts):
                raw = as_theirs(config, own, each, part, dtype)
                yield to_hf(family, own), hf_shape(config, own, each), raw
        elif not place.of:
            yield place.name, shape, data
        else:
            stacked = np.frombuffer(data, _WORDS[dtype]).reshape(experts, -1, *shape[1:])
            parts.setdefault(place.name, {})[place.at] = stacked
            if len(parts[place.name]) == place.of:
                expert_rows = [part for _, part in sorted(parts.pop(place.name).items())]
                joined = np.stack([side_by_side(parts, place.in_turn) for parts in zip(*expert_rows, strict=True)])
                yield place.name, joined.shape, joined.tobytes()


def _by_expert(name: str, shape: tuple[int, ...], data: bytes, experts: int) -> Iterator[Row]:
    """A parameter, or each expert's where it holds those of a layer; experts: how many these are, 0: it stays whole."""
    if ".experts." not in name or not experts:
        yield name, shape, data
        return
    size = len(data) // experts
    param, each = Param(name, shape, "replicate", experts=experts), (shape[0] // experts, *shape[1:])
    for number in range(experts):
        yield param.expert(number), each, data[number * size : (number + 1) * size]


def _write_tensors(folder: Path, tensors: Iterable[Row], dtype: str) -> None:
    """Files of up to FILE_BYTES and, where these are several, the index that says where each tensor is."""
    files: list[list[str]] = []  # Hugging Face's names of the tensors in each file
    pending: list[tuple[str, tuple[int, ...], bytes]] = []
    size = total = 0

    def write_pending() -> None:
        files.append([name for name, _, _ in pending])
        _write_file(folder / f"part-{len(files):05d}", pending, dtype)
        pending.clear()

    for name, shape, raw in tensors:
        if size and size + len(raw) > FILE_BYTES:
            write_pending()
            size = 0
        pending.append((name, shape, raw))
        size, total = size + len(raw), total + len(raw)
    write_pending()
    if len(files) == 1:
        (folder / "part-00001").rename(folder / "model.safetensors")
        return
    placed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number:05d}").rename(folder / file)
        placed |= dict.fromkeys(names, file)
    described = {"metadata": {"total_size": total}, "weight_map": placed}
    write_atomically(folder / INDEX, json.dumps(described, indent=1) + "\n")


def _write_file(path: Path, tensors: list[tuple[str, tuple[int, ...], bytes]], dtype: str) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors:
            file.write(data)
