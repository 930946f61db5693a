"""Deterministic random tensors for any configuration, in place of a file (``--weights random:SEED[:FORMAT]``)."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from roofline.common.errors import ConfigError
from roofline.models.mixes import format_in_blocks
from roofline.models.presets import preset
from roofline.ops import formats
from roofline.weights import names
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.files.mapped import JsonObject, TensorInfo
from roofline.weights.latent_form import latent_config

_PREFIX = "random:"
PRESET = "preset:"
POOL = 1 << 22  # numbers that pooled weights of a width repeat
_ONES = ("norm.weight", ".scalar.weight", ".expert_scale.weight", ".altup.scale.weight")


def parse(text: str) -> tuple[int, str]:
    """``"random:7"`` -> (7, "BF16"), ``"random:7:Q4_0"`` -> (7, "Q4_0"). Raises ConfigError for anything else."""
    digits, colon, form = text.removeprefix(_PREFIX).partition(":")
    bad = not text.startswith(_PREFIX) or not digits.isdecimal() or (colon and not form)
    if bad or int(digits) >= 1 << 64:
        raise ConfigError(
            f"weights {text!r} are not random:SEED or random:SEED:FORMAT with a whole number below 2^64 as SEED"
        )
    return int(digits), form or "BF16"


def random_checkpoint(config: JsonObject, seed: int, form: str = "BF16") -> Checkpoint:
    """A Checkpoint whose tensors are made when they are read, and never kept.

    A tensor is a function of (seed, its name, its shape) alone: matrices are uniform with standard deviation
    1 / sqrt(cols), so that activations keep their size; norms, and numbers that multiply, are ones; biases have
    standard deviation 0.02.

    Args:
        config: the canonical configuration with its family.
        form: format of the matrices; vectors stay F32 beside a block format, as in files, and so do taps of
            convolutions and other small matrices that are no whole blocks (`format_in_blocks`).

    Raises ConfigError when rows of the other matrices are not whole blocks of the format, UnsupportedError for an
    unknown format.
    """

    def infos(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
        tensors = {}
        for name, shape in shapes.items():
            kind = formats.get(format_in_blocks(form, name, shape))
            try:
                tensors[name] = TensorInfo(name, kind.name, shape, kind.nbytes(shape))
            except ConfigError as error:
                raise ConfigError(f"random weights, tensor {name!r}: {error}") from error
        return tensors

    tensors, guessing = infos(names.parameter_shapes(config)), infos(names.guessing_shapes(config))

    def read(name: str) -> np.ndarray:
        info = tensors[name] if name in tensors else guessing[name]
        return formats.get(info.format).quantize(random_values(name, info.shape, seed))

    return Checkpoint(
        path=Path(f"{_PREFIX}{seed}"),
        kind="random",
        tensors=tensors,
        metadata={},
        config=config,
        bytes_of=read,
        guessing=guessing,
    )


def pooled_checkpoint(config: JsonObject, seed: int, form: str = "BF16") -> Checkpoint:
    """Make a checkpoint as `random_checkpoint` does, but the rows of all matrices of a width repeat the same few
    million numbers: for timing large shapes, whose weights would take minutes to make."""
    plain = random_checkpoint(config, seed, form)
    pools: dict[int, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        info = plain.tensors[name] if name in plain.tensors else plain.guessing[name]
        if len(info.shape) == 1:
            return plain.read(name)
        width = info.shape[1]
        if width not in pools:
            rows = max(1, POOL // width)
            pools[width] = formats.get(info.format).quantize(random_values(f"pool.{width}", (rows, width), seed))
        return np.resize(pools[width], info.nbytes)

    return replace(plain, bytes_of=read)


def preset_checkpoint(
    source: str, weights: str | None, latent: Callable[[JsonObject], bool] = lambda config: False
) -> Checkpoint:
    """Random weights in a named shape: "preset:NAME", a name of `models.presets`; latent: whether a configuration is to
    have the matrices of that form (`latent_form`). Raises ConfigError."""
    plain = preset(source.removeprefix(PRESET))
    config = latent_config(plain, latent(plain))
    if weights is None:
        raise ConfigError(f"{source} is a shape without weights: say weights='random:SEED'")
    return random_checkpoint(config, *parse(weights))


def random_values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 [shape] of one parameter, the same on every machine and with every numpy."""
    if name.endswith(_ONES):
        return np.ones(shape, np.float32)
    count = math.prod(shape)
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "<u8")
    # Raw bits: numpy keeps a bit generator's stream for ever, but not what its distributions make of it.
    bits = np.random.Philox(key=key).random_raw((count + 1) // 2).astype("<u8").view("<u4")[:count]
    deviation = 0.02 if name.endswith(".bias") else 1 / math.sqrt(shape[-1])
    half_width = np.float32(deviation * math.sqrt(3))  # a uniform number in [-a, a) has the deviation a / sqrt(3)
    unit = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)  # 24 bits, exact
    return (unit * half_width).reshape(shape)
