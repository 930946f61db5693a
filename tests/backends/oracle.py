"""The oracle: a model's own text on float32 tensors, weights dequantised, the whole sequence at once."""

from collections.abc import Sequence

import numpy as np

from roofline.backends.checkpoint import Tensors
from roofline.models.config import ModelConfig
from roofline.models.family import Family
from roofline.models.forward import forward
from roofline.ops import formats
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits, Segment
from tests.models.eager import LastStates, caches_of, eager_batch


def oracle_logits(family: Family, cfg: ModelConfig, checkpoint: Tensors, ids: Sequence[int]) -> np.ndarray:
    """float32 logits [len(ids), vocab] of every position, in plain float32 arithmetic."""
    import torch

    parameters = {
        name: torch.from_numpy(formats.get(info.format).dequantize(checkpoint.read(name), info.shape))
        for name, info in checkpoint.tensors.items()
    }
    count = len(ids)
    pages = -(-count // PAGE_TOKENS)
    batch = Batch(BatchLimits(count, 1, count, pages))
    batch.fill([Segment(ids, 0, range(pages))], range(count))
    with torch.no_grad():
        stores = caches_of(cfg), None, LastStates(dict(cfg.state_parts))
        return forward(family, cfg, parameters, eager_batch(batch, *stores)).numpy()
