"""The options of `roofline bench lora`."""

from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.options import Options, option

BASES = ("bf16", "f32", "stored", "nf4", "q8_0", "q4_1")
METHODS = ("lora", "dora", "full")


@dataclass(frozen=True)
class LoraBenchOptions(Options):
    """What is timed."""

    data: Path | None = option(
        None, "A file or folder that `roofline finetune` reads. Default: random samples as long as abstracts."
    )
    pack: bool = option(False, "Put several samples into a row.")
    method: str = option("lora", "What is trained.", choices=METHODS, key="adapter.method")
    base: str = option("bf16", "How matrices that are not trained are kept.", choices=BASES, key="adapter.base")
    rank: int = option(16, "Of adapters; alpha is twice that.", minimum=1, key="adapter.rank")
    steps: int = option(200, "Steps of each run that count.", minimum=1)
    epochs: int | None = option(
        None, "Instead of steps: times that each run reads the data, so that losses compare.", minimum=1
    )
    warmup: int = option(10, "Steps before those that count.", minimum=0)
    max_seq_len: int = option(512, "Tokens of a row, at which samples are cut.", minimum=8)
    seed: int = option(17, "Of the samples and of the run.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        spare = [name for name, default in (("base", "bf16"), ("rank", 16)) if getattr(self, name) != default]
        if self.method == "full" and spare:
            value = getattr(self, spare[0])
            raise ConfigError(f"{spare[0]}={value} is of lora and dora: method=full trains all matrices as they are")
        if self.epochs is not None and self.steps != 200:
            raise ConfigError("steps and epochs both say how long a run is: leave one of the two out")
