"""A model of how long an all-reduce takes over given links, to rank sets of devices with.

A ring passes 1/n of the data in each of 2 (n - 1) steps (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009); a tree reduces to its root and broadcasts from it, each in as many steps as it is
deep, with all the data on each link (in pieces that follow each other). The shorter of the two counts. Only a
measurement says how long a library takes (backends/gpu/measure/collectives.py); the model says which sets to measure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.hardware.links.topology import OWN, Links

# Seconds that a step takes beside moving its bytes: assumed, not measured. A way through the host has two steps.
STEP = 5e-6
# Bytes a second through the host, where there is no link: PCI Express 4.0 x16 in one direction, by its specification.
HOST = 31.5e9
_SETS_GROWN = 100  # sets of each size from which larger ones are grown: all of them with up to 8 devices


@dataclass(frozen=True)
class AllReducePlan:
    """members: numbers of devices; seconds: modelled; way: "ring" or "tree"; used: the pairs that exchange data, a
    tree's from parent to child; slowest: bytes a second of the narrowest of them, shared ports counted."""

    members: tuple[int, ...]
    seconds: float
    way: str
    used: tuple[tuple[int, int], ...]
    slowest: float


def ranked_sets(links: Links, count: int, nbytes: int) -> list[AllReducePlan]:
    """Sets of `count` devices, that with the shortest all-reduce of `nbytes` first; equal ones by the rates of all
    their links, then by packages, then by number.

    Grown device by device from the best smaller sets, which leaves none out with up to 8 devices. Raises ConfigError
    where there are not so many devices.
    """
    if not 1 <= count <= len(links.names):
        raise ConfigError(f"{count} devices are wanted, there are {len(links.names)}")
    plans = [estimate(links, (number,), nbytes) for number in range(len(links.names))]
    for _ in range(count - 1):
        grown = {
            tuple(sorted((*members, more)))
            for members in (plan.members for plan in plans[:_SETS_GROWN])
            for more in range(len(links.names))
            if more not in members
        }
        plans = sorted((estimate(links, members, nbytes) for members in grown), key=lambda plan: _rank(links, plan))
    return plans


def _rank(links: Links, plan: AllReducePlan) -> tuple[float, float, int, tuple[int, ...]]:
    packages = len({links.packages[member] for member in plan.members})
    return plan.seconds, -links.total_rate(plan.members), packages, plan.members


def estimate(links: Links, members: Sequence[int], nbytes: int) -> AllReducePlan:
    """The shortest modelled all-reduce of `nbytes` on every one of `members`."""
    chosen = tuple(members)
    if len(chosen) == 1:
        return AllReducePlan(chosen, 0.0, "ring", (), float("inf"))
    plans = [_ring_plan(links, chosen, nbytes)]
    plans += [_tree_plan(links, chosen, parents, nbytes) for parents in _trees(links, chosen)]
    return min(plans, key=lambda plan: plan.seconds)


def _rate(links: Links, a: int, b: int) -> float:
    return links.rates[a][b] or HOST


def _steps(links: Links, a: int, b: int) -> int:
    return 1 if links.rates[a][b] else 2


def _ring_plan(links: Links, members: tuple[int, ...], nbytes: int) -> AllReducePlan:
    cycle = _widest_ring(links, members)
    used = tuple(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    slowest = min(_rate(links, a, b) for a, b in used)
    waits = max(_steps(links, a, b) for a, b in used) * STEP
    seconds = 2 * (len(members) - 1) * (waits + nbytes / len(members) / slowest)
    return AllReducePlan(members, seconds, "ring", used, slowest)


def _widest_ring(links: Links, members: tuple[int, ...]) -> tuple[int, ...]:
    """The order in which the narrowest link of a round trip is widest."""
    rates = sorted({_rate(links, a, b) for a in members for b in members if a != b}, reverse=True)
    for least in rates:
        cycle = next(_rings(links, members, (members[0],), least), None)
        if cycle is not None:
            return cycle
    raise AssertionError("every pair has a rate: some ring has the least of them")


def _rings(links: Links, members: tuple[int, ...], path: tuple[int, ...], least: float) -> Iterator[tuple[int, ...]]:
    if len(path) == len(members):
        if _rate(links, path[-1], path[0]) >= least:
            yield path
        return
    for member in members:
        if member not in path and _rate(links, path[-1], member) >= least:
            yield from _rings(links, members, (*path, member), least)


def _trees(links: Links, members: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """Trees worth a look, as child -> parent: from each root the flat one and that of the widest links."""
    for root in members:
        yield {member: root for member in members if member != root}
        parents: dict[int, int] = {}
        inside = [root]
        while len(inside) < len(members):
            outside = [member for member in members if member not in inside]
            pairs = ((a, b) for a in inside for b in outside)
            # Of equally wide links that from the oldest member: the tree stays flat.
            parent, child = max(pairs, key=lambda pair: (_rate(links, *pair), -inside.index(pair[0])))
            parents[child] = parent
            inside.append(child)
        yield parents


def _tree_plan(links: Links, members: tuple[int, ...], parents: dict[int, int], nbytes: int) -> AllReducePlan:
    shared: dict[int, int] = {}
    for pair in parents.items():
        if links.kinds[pair[0]][pair[1]] not in OWN:
            for end in pair:
                shared[end] = shared.get(end, 0) + 1
    slowest = min(
        _rate(links, *pair) / (1 if links.kinds[pair[0]][pair[1]] in OWN else max(shared[end] for end in pair))
        for pair in parents.items()
    )
    waits = max(_depth(links, parents, member) for member in members) * STEP
    seconds = 2 * (waits + nbytes / slowest)
    return AllReducePlan(members, seconds, "tree", tuple((parent, child) for child, parent in parents.items()), slowest)


def _depth(links: Links, parents: dict[int, int], member: int) -> int:
    """Steps to the root."""
    steps = 0
    while member in parents:
        steps += _steps(links, member, parents[member])
        member = parents[member]
    return steps
