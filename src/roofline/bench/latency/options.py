"""The options of `roofline bench latency`."""

from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import ConfigError
from roofline.common.options import Options, option


@dataclass(frozen=True)
class LatencyOptions(Options):
    """What `bench latency` times."""

    preset: str | None = option(None, "A named shape, or a folder with a config.json. Weights are random.")
    layers: int | None = option(None, "Run only so many of its layers. Default: all.", minimum=1, unit="layers")
    rungs: str | None = option(None, "With commas; + joins techniques: eager,compile,paged+tuned.")
    batch: str = option("1,8,16", "Batch sizes, with commas.")
    prompt: int | None = option(None, "Tokens of a prefill: 2048, or 256 on a CPU.", minimum=2, unit="tokens")
    new: int = option(32, "Tokens that decoding makes, after a prompt of one.", minimum=2, unit="tokens")
    repeats: int | None = option(None, "Timed runs of each: 10, or 3 on a CPU.", minimum=1, unit="runs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "cuda: AMD's GPUs too.")


def numbers(text: str) -> list[int]:
    """ "1,8,16" -> [1, 8, 16]. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--batch {text!r} are not whole numbers with commas between, such as 1,8,16")
    return [int(part) for part in parts]
