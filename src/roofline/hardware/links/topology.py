"""The links among a host's devices: a matrix of rates, how it is read from text, and which devices share a package.

detect.py fills the matrix from this host; allreduce.py estimates what it means for collectives.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError

OWN = ("xgmi", "nvlink")  # links that serve one pair alone; the port of a "switch" serves all pairs of a device


@dataclass(frozen=True)
class Links:
    """names: of the devices, by number; packages: the number of each one's package.

    rates: bytes a second that each pair's direct link carries in one direction, 0 where it has none and data go through
    the host; kinds: "xgmi" or "nvlink" for a pair's own wires, "switch" where a device's one port serves all its pairs,
    "" without a link.
    """

    names: tuple[str, ...]
    packages: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]
    kinds: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.names)
        for what, matrix in (("rates", self.rates), ("kinds", self.kinds)):
            if len(matrix) != count or any(len(row) != count for row in matrix):
                raise ConfigError(f"the links' {what} are not {count} x {count}, one row and column for each device")
        if len(self.packages) != count:
            raise ConfigError(f"the links name packages of {len(self.packages)} devices, there are {count}")
        if any(self.rates[a][b] != self.rates[b][a] for a in range(count) for b in range(a)):
            raise ConfigError("a link's rate differs by direction: the matrix is damaged")

    def total_rate(self, members: Sequence[int]) -> float:
        """Bytes a second of all direct links among these devices together."""
        return sum(self.rates[a][b] for a in members for b in members if a < b)

    def by_package(self, members: Sequence[int]) -> list[list[str]]:
        """The members' names, those of one package together."""
        names: dict[int, list[str]] = {}
        for member in members:
            names.setdefault(self.packages[member], []).append(self.names[member])
        return list(names.values())

    def as_dict(self) -> dict[str, list[str] | list[int] | list[dict[str, object]]]:
        """As plain values; `from_json` reads the same."""
        linked = [(a, b) for b in range(len(self.names)) for a in range(b) if self.rates[a][b]]
        return {
            "devices": list(self.names),
            "packages": list(self.packages),
            "links": [
                {"between": [a, b], "gb_s": self.rates[a][b] / 1e9, "kind": self.kinds[a][b]} for a, b in sorted(linked)
            ],
        }


def links_from_pairs(
    names: Sequence[str],
    pairs: Iterable[tuple[int, int, float, str]],
    packages: Sequence[int] | None = None,
    dies: Sequence[int] = (),
) -> Links:
    """The matrix of `pairs`: two devices, bytes a second in one direction, kind; later ones of a pair replace earlier.

    packages: of each device, or `dies`: how many devices its package has (see `package_of_each`).
    """
    count = len(names)
    rates = [[0.0] * count for _ in names]
    kinds = [[""] * count for _ in names]
    for a, b, rate, kind in pairs:
        if a != b and rate > 0:
            rates[a][b] = rates[b][a] = rate
            kinds[a][b] = kinds[b][a] = kind
    packages = package_of_each(rates, dies or [1] * count) if packages is None else packages
    return Links(tuple(names), tuple(packages), tuple(map(tuple, rates)), tuple(map(tuple, kinds)))


def package_of_each(rates: Sequence[Sequence[float]], dies: Sequence[int]) -> tuple[int, ...]:
    """The package of each device, numbered by its first. Two dies of one package are joined by its widest link.

    dies: how many devices each one's package has, 1 or 2. Where no link is known, neighbours are a pair.
    """
    packages = list(range(len(dies)))
    free = [number for number, count in enumerate(dies) if count == 2]
    while len(free) > 1:
        first = free.pop(0)
        partner = max(free, key=lambda other: (rates[first][other], -other))
        free.remove(partner)
        packages[partner] = first
    return tuple(packages)


def parse(text: str, dies: int = 1) -> Links:
    """A matrix from text: JSON as `Links.as_dict` has it, or the table that `rocm-smi --shownodesbw` prints.

    dies: devices in each package, for a table, which does not say it. Raises ConfigError saying what cannot be read.
    """
    if text.lstrip().startswith("{"):
        return from_json(text)
    rows = [line.split() for line in text.splitlines()]
    rows = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])]
    names = next((words for words in rows if all(re.fullmatch(r"GPU\d+", word) for word in words)), None)
    body = [words for words in rows if words is not names]
    if names is None or [words[0] for words in body] != names or any(len(w) != len(names) + 1 for w in body):
        raise ConfigError(
            "this is neither JSON nor the table of `rocm-smi --shownodesbw`: a row for each GPU is wanted"
        )
    rates = tuple(tuple(_megabytes(cell) for cell in words[1:]) for words in body)
    kinds = tuple(tuple("xgmi" if rate else "" for rate in row) for row in rates)
    return Links(tuple(names), package_of_each(rates, [dies] * len(names)), rates, kinds)


def _megabytes(cell: str) -> float:
    """Bytes a second of "50000-200000", MB/s of one link and of all; "N/A" is the diagonal, "0-0" no link."""
    if cell == "N/A":
        return 0.0
    match = re.fullmatch(r"\d+-(\d+)", cell)
    if not match:
        raise ConfigError(f"{cell!r} is no rate as `rocm-smi --shownodesbw` prints them, such as 50000-200000")
    return int(match[1]) * 1e6


def from_json(text: str) -> Links:
    """What `Links.as_dict` gave. Raises ConfigError naming what is missing or wrong."""
    try:
        table = json.loads(text)
        names = [str(name) for name in table["devices"]]
        pairs = []
        for link in table["links"]:
            a, b = (int(end) for end in link["between"])
            if not (0 <= a < len(names) and 0 <= b < len(names) and a != b) or not float(link["gb_s"]) > 0:
                raise ConfigError(f"{link} is no link between two of {len(names)} devices")
            pairs.append((a, b, float(link["gb_s"]) * 1e9, str(link.get("kind", "xgmi"))))
        packages = table.get("packages")
        return links_from_pairs(names, pairs, None if packages is None else [int(package) for package in packages])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the links cannot be read from JSON: {type(error).__name__}: {error}") from error
