"""The LoRA matrices of a device: of each matrix of the model that may be adapted, those of every slot side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.backends.gpu.runtime.step import dtypes
from roofline.common.errors import UnsupportedError
from roofline.ops.adapters import PlacedMatrix
from roofline.program.passes.adapt import Site, sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.program.ir import Program


@dataclass(frozen=True)
class SiteMatrices:
    """Of one matrix of the model. a: [slots, rank, inputs]; b: [slots, outputs, rank], both of the dtype of the rows;
    scales: float32 [slots]. Slots without an adapter, and ranks beyond an adapter's own, are zeros."""

    site: Site
    a: "Tensor"
    b: "Tensor"
    scales: "Tensor"


class DeviceAdapters:
    """Memory for the adapters of an adapted Program.

    slots: of adapters; rank: the largest of one; device: torch's name. Raises UnsupportedError for a rank that the
    kernel does not have.
    """

    def __init__(self, program: "Program", slots: int, rank: int, device: str) -> None:
        import torch

        check_rank(rank)
        self._device = device

        def matrices(site: Site) -> SiteMatrices:
            a = torch.zeros(slots, rank, site.inputs, dtype=_row_dtype(program), device=device)
            b = torch.zeros(slots, site.outputs, rank, dtype=_row_dtype(program), device=device)
            return SiteMatrices(site, a, b, torch.zeros(slots, device=device))

        self._by_name = {name: matrices(site) for name, site in sites(program).items()}

    def of_group(self, group: int) -> Sequence[SiteMatrices]:
        """Those of the matrices that read one value."""
        return [slots for slots in self._by_name.values() if group in slots.site.groups]

    def set(self, slot: int, placed: Sequence[PlacedMatrix]) -> None:
        """Copy an adapter into its slot, from 1 on; no matrices: free it. Between steps: what was queued before reads
        what was there."""
        import torch

        if any(item.gain is not None for item in placed):
            what, reason = "a DoRA adapter on a GPU", "its kernel scales no rows"
            raise UnsupportedError(what, reason, ("roofline merge, which writes a model with the adapter in it",))
        for each in self._by_name.values():
            for tensor in (each.a, each.b, each.scales):
                tensor[slot - 1].zero_()
        for item in placed:
            each, rank = self._by_name[item.matrix.tensor], item.matrix.rank
            each.a[slot - 1, :rank].copy_(torch.from_numpy(item.matrix.a))
            each.b[slot - 1, :, :rank].copy_(torch.from_numpy(item.matrix.b).T)
            each.scales[slot - 1] = item.matrix.scale


def adapter_bytes(program: "Program", slots: int, rank: int) -> int:
    """Bytes that DeviceAdapters will take."""
    places: Mapping[str, Site] = sites(program)
    values = sum(rank * (site.inputs + site.outputs) for site in places.values())
    return slots * (values * _row_dtype(program).itemsize + 4 * len(places))


def check_rank(rank: int) -> None:
    """Raises UnsupportedError for a rank that the kernel does not have."""
    from roofline.backends.gpu.kernels.adapter import LARGEST_RANK

    if rank > LARGEST_RANK:
        what = f"adapters of rank {rank} on a GPU"
        raise UnsupportedError(what, f"its kernel has {LARGEST_RANK} at most", (f"max_adapter_rank={LARGEST_RANK}",))


def _row_dtype(program: "Program") -> "torch.dtype":
    return dtypes()[program.rows_dtype()]
