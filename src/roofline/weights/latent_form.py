"""Checkpoints of models with attention over compressed rows, with the matrices of either form of it.

Files have one matrix that makes keys and values of all heads (`kv_up`, their rows head by head), or, as GGUF files do,
those of keys and of values apart (`k_up`, whose matrices are the other way round, and `v_up`). The cache of compressed
rows takes the second form (`models.latent.Config.latent`). Rows are moved as bytes; what is turned round is the same in
formats of one number each, and becomes float32 in others, whose blocks lie along the rows.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.files.mapped import JsonObject, TensorInfo

TOGETHER, KEYS, VALUES = "attn.kv_up", "attn.k_up", "attn.v_up"
_NUMBERS = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}  # formats of one number each -> what it lies in


def latent_config(config: JsonObject, latent: bool) -> JsonObject:
    """The configuration of a model in that form; one without compressed rows as it is."""
    return {**config, "latent": latent} if config.get("kv_rank") else config


def latent_form(checkpoint: Checkpoint, latent: bool) -> Checkpoint:
    """The checkpoint in that form: itself where it is, or has no compressed rows."""
    config = checkpoint.config
    if not config.get("kv_rank") or bool(config.get("latent")) == latent:
        return checkpoint
    if checkpoint.kind == "random":
        return checkpoint  # is made of its configuration
    infos, sources = dict[str, TensorInfo](), dict[str, Callable[[], np.ndarray]]()
    change = _apart if latent else _together
    for name, info in {**checkpoint.tensors, **checkpoint.guessing}.items():
        before, part = layer_part(name)
        if part not in (TOGETHER, KEYS, VALUES):
            infos[name] = info
        elif part in (TOGETHER, KEYS):
            for written, source in change(checkpoint, before):
                infos[written.name], sources[written.name] = written, source

    @lru_cache(2)  # packing reads a matrix once for each of its heads
    def made(name: str) -> np.ndarray:
        return sources[name]()

    def read(name: str) -> np.ndarray:
        return made(name) if name in sources else checkpoint.read(name)

    further = {layer_part(name)[0] for name in checkpoint.guessing}
    guessing = {name: info for name, info in infos.items() if layer_part(name)[0] in further}
    together = checkpoint.guessing.keys() <= checkpoint.tensors.keys()  # as a file that is written has them
    tensors = infos if together else {name: info for name, info in infos.items() if name not in guessing}
    changed = latent_config(config, latent)
    return replace(checkpoint, tensors=tensors, config=changed, bytes_of=read, guessing=guessing)


def latent_format(name: str, format_of: Callable[[str], str]) -> str:
    """The format of a matrix that is made of others of its layer. format_of: that of a tensor that files have."""
    before, part = layer_part(name)
    if part == TOGETHER:
        keys, values = (format_of(f"{before}{other}.weight") for other in (KEYS, VALUES))
        return keys if keys == values and keys in _NUMBERS else "F32"
    form = format_of(f"{before}{TOGETHER}.weight")
    return form if part == VALUES or form in _NUMBERS else "F32"


Made = tuple[TensorInfo, Callable[[], np.ndarray]]


def _apart(checkpoint: Checkpoint, before: str) -> list[Made]:
    """The matrices of keys and of values of a layer whose file has them together."""
    info, config = checkpoint.info(f"{before}{TOGETHER}.weight"), checkpoint.config
    heads, plain, value, rank = _sizes(config)

    def rows(first: int, last: int) -> np.ndarray:
        """uint8 [heads, rows of a head, bytes of a row]."""
        return checkpoint.read(info.name).reshape(heads, plain + value, -1)[:, first:last]

    def keys() -> np.ndarray:
        numbers = _numbers(info, np.ascontiguousarray(rows(0, plain)), (heads, plain, rank))
        return np.ascontiguousarray(numbers.transpose(0, 2, 1)).reshape(-1).view(np.uint8)

    def values() -> np.ndarray:
        return np.ascontiguousarray(rows(plain, plain + value)).reshape(-1)

    v_rows = heads * value
    return [
        (_turned(info, f"{before}{KEYS}.weight", (heads * rank, plain)), keys),
        (
            replace(
                info,
                name=f"{before}{VALUES}.weight",
                shape=(v_rows, rank),
                nbytes=info.nbytes // info.shape[0] * v_rows,
            ),
            values,
        ),
    ]


def _together(checkpoint: Checkpoint, before: str) -> list[Made]:
    """The inverse; in float32 where they are in different formats, or in one of blocks."""
    k_info, v_info = (checkpoint.info(f"{before}{part}.weight") for part in (KEYS, VALUES))
    heads, plain, value, rank = _sizes(checkpoint.config)
    form = k_info.format if k_info.format == v_info.format and k_info.format in _NUMBERS else "F32"

    def join() -> np.ndarray:
        k = _as(form, k_info, checkpoint.read(k_info.name), (heads, rank, plain)).transpose(0, 2, 1)
        v = _as(form, v_info, checkpoint.read(v_info.name), (heads, value, rank))
        return np.ascontiguousarray(np.concatenate([k, v], axis=1)).reshape(-1).view(np.uint8)

    return [
        (_turned(replace(k_info, format=form), f"{before}{TOGETHER}.weight", (heads * (plain + value), rank)), join)
    ]


def _sizes(config: JsonObject) -> tuple[int, int, int, int]:
    """Heads, and of each the columns of a key that are not turned, those of a value; and those of a compressed row."""
    heads, value, rank = (int(config[name]) for name in ("heads", "value_dim", "kv_rank"))
    return heads, int(config["head_dim"]) - int(config["rotary_dim"]), value, rank


def _turned(info: TensorInfo, name: str, shape: tuple[int, int]) -> TensorInfo:
    form = info.format if info.format in _NUMBERS else "F32"
    return replace(info, name=name, shape=shape, format=form, nbytes=formats.get(form).nbytes(shape))


def _numbers(info: TensorInfo, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of a tensor's rows as they lie in memory, of a format of blocks their float32."""
    return _as(info.format if info.format in _NUMBERS else "F32", info, raw, shape)


def _as(form: str, info: TensorInfo, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if form == info.format:
        return raw.reshape(-1).view(_NUMBERS[form]).reshape(shape)
    return formats.get(info.format).dequantize(raw.reshape(-1), shape).view("<u4")
