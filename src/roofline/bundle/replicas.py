"""Copies of a model beside each other on this machine: what of it each of them takes."""

from dataclasses import dataclass, field

from roofline.backends.options import LoadOptions
from roofline.common.errors import CapacityError
from roofline.common.json_types import JsonObject


@dataclass(frozen=True)
class ReplicaPlace:
    """One copy's place. options: of `load`, instead of those of the same name; draft_options: those of the draft model
    beside it, which runs on its rank 0; cores: it keeps to these; none: any."""

    options: JsonObject = field(default_factory=dict)
    draft_options: JsonObject = field(default_factory=dict)
    cores: list[int] = field(default_factory=list)


def divided(load: LoadOptions, copies: int) -> list[ReplicaPlace]:
    """The places of so many copies of what `load` would load with these options.

    On a host's cores each copy has an equal part of the threads, which its ranks divide, and cores of its own where one
    copy would have all that this process may use. `threads`, of `load` or the environment, is what all have together.
    Devices are found by who loads, as only that process has torch.

    Raises CapacityError for more copies, or ranks of them, than threads.
    """
    replicas = [(number, copies) for number in range(copies)]
    ranks = load.ranks
    drafts = [(number * ranks, copies * ranks) for number in range(copies)]  # rank 0 has the first device of its group
    if load.backend == "gpu":
        return [ReplicaPlace({"replica": own}, {"replica": draft}) for own, draft in zip(replicas, drafts, strict=True)]
    from roofline.backends.cpu.select import choose_threads
    from roofline.hardware.cores import split_cores

    threads = int(choose_threads(load.threads).value)
    if copies * ranks > threads:
        remedy = f"Lower it to {threads // ranks}, as each {'rank ' if ranks > 1 else ''}needs one, or raise threads."
        of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
        raise CapacityError(f"data_parallel={copies}{of_ranks}", copies * ranks, threads, "threads", remedy)
    share = threads // copies  # of a copy, whose ranks divide it; the draft model is on one of them
    return [
        ReplicaPlace({"replica": own, "threads": share}, {"replica": draft, "threads": share // ranks}, cores)
        for own, draft, cores in zip(replicas, drafts, split_cores(copies), strict=True)
    ]
