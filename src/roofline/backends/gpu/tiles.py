"""Which tile a kernel runs with on a chip: rows of tiles.toml, the first that fits."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.hardware.chips.chips import Chip

Row = JsonObject  # of a TOML file that is part of the package


@dataclass(frozen=True)
class Tile:
    """warps: of `lanes` threads each; stages: depth of the software pipeline; sizes: constexpr name -> value;
    options: of one vendor's compiler ("waves_per_eu")."""

    warps: int
    stages: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def launch(self) -> dict[str, object]:
        """Keyword arguments of a launch, sizes included."""
        return {**self.sizes, **self.compiler()}

    def compiler(self) -> dict[str, object]:
        """What the compiler is told beside the constants."""
        return {"num_warps": self.warps, "num_stages": self.stages, **self.options}


@cache
def _rows() -> dict[str, list[Row]]:
    text = resources.files("roofline.backends.gpu").joinpath("tiles.toml").read_text("utf-8")
    return tomllib.loads(text)


def choose(kernel: str, chip: Chip, **facts: object) -> Tile:
    """The tile of the first row whose `chips` (prefixes of names) and `when` (equal facts) fit.

    Raises ConfigError where none does: the last row of a kernel should fit everything.
    """
    return _chosen(kernel, chip.name, **facts)


@cache
def _chosen(kernel: str, chip: str, **facts: object) -> Tile:
    for row in _rows().get(kernel, []):
        when = row.get("when", {})
        if chip.startswith(tuple(row.get("chips", ("",)))) and all(facts.get(k) == v for k, v in when.items()):
            sizes = {key: value for key, value in row.items() if key.isupper()}
            return Tile(row.get("warps", 4), row.get("stages", 2), sizes, row.get("options", {}))
    raise ConfigError(f"tiles.toml has no row for the kernel {kernel!r} on {chip} with {facts}")
