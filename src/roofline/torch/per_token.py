"""Whole sequences through a trace, one row of its result for each token, beside the engine and its cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from roofline.backends.base import Executable
from roofline.common.errors import CapacityError
from roofline.engine.params import invalid
from roofline.ops.batch import PAGE_TOKENS, BatchLimits, Segment

CHUNK = 128  # tokens of a step: its rows of logits are what memory is needed for


class PerToken:
    """Runs one trace of a model.

    Args:
        make: (limits, pages) -> an executable; called again when a sequence needs more pages than the last had.
        vocab: ids there are.
        longest: tokens a sequence may have.
    """

    def __init__(self, make: Callable[[BatchLimits, int], Executable], vocab: int, longest: int) -> None:
        self._make, self._vocab, self._longest = make, vocab, longest
        self._executable: Executable | None = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """float32 [*input_ids.shape, width], on the ids' device. input_ids: integers [tokens] or [batch, tokens].

        Raises:
            RequestError: ids that are none, or of another shape.
            CapacityError: a sequence longer than the model's context.
        """
        rows = self._checked(input_ids)
        executable = self._holding(rows.shape[1])
        out = torch.cat([self._run(executable, row) for row in rows.tolist()])  # [batch * tokens, width]
        return out.reshape(*input_ids.shape, -1).to(input_ids.device)

    def close(self) -> None:
        """Free the trace's memory."""
        if self._executable is not None:
            self._executable.close()
            self._executable = None

    def _checked(self, input_ids: Tensor) -> Tensor:
        """int64 [batch, tokens] on the CPU."""
        if not isinstance(input_ids, Tensor):
            raise invalid("input_ids", f"{type(input_ids).__name__} is no tensor: give torch.tensor(ids)")
        if input_ids.dim() not in (1, 2) or input_ids.numel() == 0:
            raise invalid("input_ids", f"has shape {list(input_ids.shape)}, not [tokens] or [batch, tokens]")
        if input_ids.dtype.is_floating_point or input_ids.dtype.is_complex or input_ids.dtype == torch.bool:
            raise invalid("input_ids", f"is {input_ids.dtype}, not integers")
        rows = input_ids.detach().cpu().long().reshape(-1, input_ids.shape[-1])
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= self._vocab:
            raise invalid("input_ids", f"id {low if low < 0 else high} is not in the vocabulary of {self._vocab}")
        if rows.shape[1] > self._longest:
            remedy = "Shorten it, or load with a larger max_model_len and cache_tokens."
            raise CapacityError("a sequence", rows.shape[1], self._longest, "tokens", remedy)
        return rows

    def _holding(self, tokens: int) -> Executable:
        """An executable whose cache holds a sequence of that length."""
        pages = -(-tokens // PAGE_TOKENS)
        if self._executable is None or self._executable.num_pages < pages:
            self.close()
            pages = min(1 << (pages - 1).bit_length(), -(-self._longest // PAGE_TOKENS))
            self._executable = self._make(BatchLimits(CHUNK, 1, CHUNK, pages), pages)
        return self._executable

    def _run(self, executable: Executable, ids: list[int]) -> Tensor:
        """float32 [tokens, width] of one sequence."""
        pages = range(-(-len(ids) // PAGE_TOKENS))
        parts = []
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            executable.batch.fill([Segment(chunk, start, pages)], range(len(chunk)))
            executable.forward()
            parts.append(torch.from_numpy(executable.logits().copy()))
        return torch.cat(parts)
