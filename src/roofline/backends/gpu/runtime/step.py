"""What the launches of one step share: sizes, the batch's fields on the device, and the values in the arena."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roofline.ops.batch import NO_SLOT, STATE_FIELDS, Batch
from roofline.ops.symbol import Type
from roofline.program.ir import ArenaPlace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roofline.backends.gpu.kernels.attend_launches import Launch as AttendLaunch
    from roofline.backends.gpu.kernels.experts import Schedule


@dataclass(frozen=True)
class StepSizes:
    """tokens, rows, segments of a step, padded ones included; max_query, max_context: the most one segment has;
    decodes: leading segments of one query that come before others of more; adapted: whether a token has an adapter."""

    tokens: int
    rows: int
    segments: int
    max_query: int
    max_context: int
    decodes: int = 0
    adapted: bool = False

    def of_attention(self) -> dict[str, int]:
        """Those that say how attention is cut into launches, by name."""
        return {name: size for name, size in vars(self).items() if name not in ("rows", "adapted")}


@dataclass
class GpuStep:
    """One step's sizes and tensors; `values` are views of the arena, made when first asked for.

    types, places: of the Program's values; fields: batch fields, int32, as long as `sizes` says; slots int64 [tokens];
    caches: kv group -> (k, v), each [layers, pages, kv_heads, 16, head_dim], of compressed rows v the last columns of
    k; states: state group -> float32 [slots, layers, values of a layer]; scratch uint8: for one launch at a time;
    launches: how attention is cut into programs, the same for all layers of a kind; schedules: of experts, by the value
    that says where rows go.
    """

    types: Mapping[str, Type]
    places: Mapping[str, ArenaPlace]
    sizes: StepSizes
    fields: "dict[str, Tensor]"
    slots: "Tensor"
    caches: "dict[str, tuple[Tensor, Tensor]]"
    states: "dict[str, Tensor]"
    arena: "Tensor"
    scratch: "Tensor"
    launches: "dict[object, tuple[AttendLaunch, ...]]" = field(default_factory=dict)
    schedules: "dict[str, Schedule]" = field(default_factory=dict)
    _views: "dict[str, Tensor]" = field(default_factory=dict)

    def value(self, name: str) -> "Tensor":
        """[rows of the value, width]: a batch field, or a view of the arena."""
        if name in self.fields:
            return self.fields[name]
        if name not in self._views:
            self._views[name] = self._view(name)
        return self._views[name]

    def _view(self, name: str) -> "Tensor":
        kind, place = self.types[name], self.places[name]
        dtype = dtypes()[kind.dtype]
        count = self.sizes.tokens if kind.leading == "tokens" else self.sizes.rows
        start = place.offset.at(tokens=self.sizes.tokens, rows=self.sizes.rows)
        flat = self.arena.view(dtype)
        size = dtype.itemsize
        return flat.as_strided((count, kind.width), (place.stride // size, 1), start // size)

    def space(self, dtype: "torch.dtype", *shape: int) -> "Tensor":
        """Scratch as a tensor, whose contents nobody keeps beyond one launch."""
        size = math.prod(shape) * dtype.itemsize
        assert size <= self.scratch.numel(), "scratch is smaller than planned"
        return self.scratch[:size].view(dtype).view(shape)


class DeviceFields:
    """A copy of a Batch's buffer on a device. device: torch's name; "cpu" and "meta" copy at once, a GPU from pinned
    memory."""

    def __init__(self, batch: Batch, device: str) -> None:
        import torch

        self.batch = batch
        self._host = torch.from_numpy(batch.buffer)
        self._uploaded = torch.cuda.Event() if device.startswith("cuda") else None
        if self._uploaded is not None:
            self._host = self._host.clone().pin_memory()
        self._fields = torch.zeros(batch.buffer.size, dtype=torch.int32, device=device)

    def sizes(self) -> StepSizes:
        """Of the step in the batch."""
        batch = self.batch
        lengths = np.diff(batch.seg_start[: batch.segments + 1])
        context = int(batch.context_len[: batch.segments].max(initial=1))
        decodes = int((lengths > 1).argmax()) if len(lengths) else 0  # 0 too where all are of one query
        longest, adapted = int(lengths.max(initial=1)), bool(batch.adapters[: batch.tokens].any())
        return StepSizes(
            tokens=batch.tokens,
            rows=batch.rows,
            segments=batch.segments,
            max_query=longest,
            max_context=context,
            decodes=decodes,
            adapted=adapted,
        )

    def pad(self, sizes: StepSizes) -> None:
        """Empty segments behind the step's own: their rows write to the scratch page, and nobody reads them."""
        batch = self.batch
        n, rows = batch.segments, batch.rows
        batch.seg_start[n + 1 : sizes.segments + 1] = batch.seg_start[n]
        batch.page_start[n + 1 : sizes.segments + 1] = batch.page_start[n]
        batch.context_len[n : sizes.segments] = 0
        batch.logit_rows[rows : sizes.rows] = 0
        batch.ids[batch.tokens : sizes.tokens] = 0
        batch.positions[batch.tokens : sizes.tokens] = 0
        batch.adapters[batch.tokens : sizes.tokens] = 0
        for slots in (batch.state_in, batch.state_out, batch.save_to):
            slots[n : sizes.segments] = NO_SLOT

    def upload(self) -> None:
        """Copy what the step uses; the batch may be filled again at once."""
        import torch

        batch = self.batch
        if self._uploaded is not None:  # what is copied from is about to change
            self._uploaded.synchronize()
        tables, rows = batch.offsets["pages"], batch.offsets["logit_rows"]
        used = int(batch.page_start[batch.segments])
        parts = [(0, tables), (tables, tables + used), (rows, rows + batch.limits.rows)]
        if batch.adapters[: batch.tokens].any():
            adapters = batch.offsets["adapters"]
            parts.append((adapters, adapters + batch.limits.tokens))
        if batch.limits.state_slots:
            parts.append((batch.offsets[STATE_FIELDS[0]], len(batch.buffer)))
        for start, stop in parts:
            if self._uploaded is not None:
                self._host[start:stop] = torch.from_numpy(batch.buffer[start:stop])
            self._fields[start:stop].copy_(self._host[start:stop], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def of(self, sizes: StepSizes) -> "dict[str, Tensor]":
        """The fields of a step of these sizes, int32, by name; adapters where the step has any, slots of recurrent
        state where there are any."""
        fields = {}
        for name, count in (
            ("header", 16), ("ids", sizes.tokens), ("positions", sizes.tokens), ("seg_start", sizes.segments + 1),
            ("context_len", sizes.segments), ("page_start", sizes.segments + 1), ("pages", self.batch.limits.pages),
            ("logit_rows", sizes.rows), *([("adapters", sizes.tokens)] if sizes.adapted else []),
            *((name, sizes.segments) for name in STATE_FIELDS if self.batch.limits.state_slots),
        ):  # fmt: skip
            start = self.batch.offsets[name]
            fields[name] = self._fields[start : start + count]
        return fields


def dtypes() -> "dict[str, torch.dtype]":
    """Our names -> torch's."""
    import torch

    return {
        "f32": torch.float32,
        "bf16": torch.bfloat16,
        "f16": torch.float16,
        "e4m3fn": torch.float8_e4m3fn,
        "e4m3fnuz": torch.float8_e4m3fnuz,
        "i64": torch.int64,
        "i32": torch.int32,
        "i8": torch.int8,
        "u8": torch.uint8,
    }
