"""The batch's integers on their way to the device."""

from typing import TYPE_CHECKING

import numpy as np

from roofline.backends.gpu.runtime.step import Sizes
from roofline.ops.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Fields:
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

    def sizes(self) -> Sizes:
        """Of the step in the batch."""
        batch = self.batch
        lengths = np.diff(batch.seg_start[: batch.segments + 1])
        context = int(batch.context_len[: batch.segments].max(initial=1))
        decodes = int((lengths > 1).argmax()) if len(lengths) else 0  # 0 too where all are of one query
        return Sizes(batch.tokens, batch.rows, batch.segments, int(lengths.max(initial=1)), context, decodes)

    def pad(self, sizes: Sizes) -> None:
        """Empty segments behind the step's own: their rows write to the scratch page, and nobody reads them."""
        batch = self.batch
        n, rows = batch.segments, batch.rows
        batch.seg_start[n + 1 : sizes.segments + 1] = batch.seg_start[n]
        batch.page_start[n + 1 : sizes.segments + 1] = batch.page_start[n]
        batch.context_len[n : sizes.segments] = 0
        batch.logit_rows[rows : sizes.rows] = 0
        batch.ids[batch.tokens : sizes.tokens] = 0
        batch.positions[batch.tokens : sizes.tokens] = 0

    def upload(self) -> None:
        """Copy what the step uses; the batch may be filled again at once."""
        import torch

        batch = self.batch
        if self._uploaded is not None:  # what is copied from is about to change
            self._uploaded.synchronize()
        tables, rows = batch.offsets["pages"], batch.offsets["logit_rows"]
        used = int(batch.page_start[batch.segments])
        for start, stop in ((0, tables), (tables, tables + used), (rows, rows + batch.limits.rows)):
            if self._uploaded is not None:
                self._host[start:stop] = torch.from_numpy(batch.buffer[start:stop])
            self._fields[start:stop].copy_(self._host[start:stop], non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def of(self, sizes: Sizes) -> "dict[str, Tensor]":
        """The fields of a step of these sizes, int32, by name."""
        fields = {}
        for name, count in (
            ("header", 16), ("ids", sizes.tokens), ("positions", sizes.tokens), ("seg_start", sizes.segments + 1),
            ("context_len", sizes.segments), ("page_start", sizes.segments + 1), ("pages", self.batch.limits.pages),
            ("logit_rows", sizes.rows),
        ):  # fmt: skip
            start = self.batch.offsets[name]
            fields[name] = self._fields[start : start + count]
        return fields
