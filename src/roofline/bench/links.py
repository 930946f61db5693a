"""`roofline bench links`: which sets of a host's devices have the fastest all-reduce, modelled and then measured."""

import datetime
from collections.abc import Sequence

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.hardware.links import allreduce
from roofline.hardware.links.topology import Links

SIZES = (16 << 10, 32 << 20)  # bytes of 1 row (decoding) and 2048 rows (prefill) of 8192 16-bit numbers


def bench_links(
    links: Links,
    count: int,
    *,
    sizes: Sequence[int] = SIZES,
    candidates: int = 8,
    measured: bool = True,
    devices: Sequence[int] | None = None,
    repeats: int = 5,
) -> JsonObject:
    """Rank the sets of `count` devices for tensor parallelism, and time an all-reduce on the first `candidates`.

    Args:
        links: of the devices. sizes: bytes of the all-reduces; a set is a candidate where it is among the first of
            one size. devices: torch's numbers of the devices, None for CPU processes. measured: whether to time at all.

    Gives a record with the links, the modelled and measured seconds of each set at each size, and the best set at each
    size, the measured one where there is one. Raises ConfigError on counts and sizes that make no sense, RooflineError
    where a process fails.
    """
    if count < 2 or candidates < 1 or repeats < 1 or not sizes or min(sizes) < 4 or len(set(sizes)) < len(sizes):
        raise ConfigError("an all-reduce is between 2 or more devices, of different sizes of 4 bytes or more")
    ranked = {size: allreduce.ranked_sets(links, count, size) for size in sizes}
    sets = list(dict.fromkeys(plan.members for plans in ranked.values() for plan in plans[:candidates]))
    between_cpus = measured and devices is None  # no link of theirs is modelled
    rows = [_row(links, members, sizes, not between_cpus) for members in sets]
    if measured:
        from roofline.backends.gpu.measure.collectives import measure

        for timing in measure(sets, sizes, len(links.names), devices, repeats):
            timed = rows[sets.index(timing.members)]["sizes"][sizes.index(timing.nbytes)]
            timed |= {"measured_s": timing.median, "repeats_s": list(timing.seconds), "bus_gb_s": timing.bus_rate / 1e9}
    key = "measured_s" if measured else "modelled_s"
    return {
        "bench": "links",
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds") if measured else None,
        "library": ("gloo" if devices is None else "nccl") if measured else None,
        "topology": links.as_dict(),
        "model": {"step_s": allreduce.STEP, "host_gb_s": allreduce.HOST / 1e9},
        "sets": rows,
        "best": {
            str(size): min(rows, key=lambda row: row["sizes"][at][key])["members"] for at, size in enumerate(sizes)
        },
    }


def _row(links: Links, members: tuple[int, ...], sizes: Sequence[int], modelled: bool) -> JsonObject:
    by_size: list[JsonObject] = [{"bytes": size} for size in sizes]
    for size in by_size if modelled else []:
        plan = allreduce.estimate(links, members, size["bytes"])
        size |= {
            "modelled_s": plan.seconds,
            "way": plan.way,
            "slowest_gb_s": plan.slowest / 1e9,
            "used": [[links.names[a], links.names[b]] for a, b in plan.used],
        }
    return {
        "members": [links.names[member] for member in members],
        "packages": links.by_package(members),
        "sizes": by_size,
    }
