"""The reference on several ranks."""

from typing import TYPE_CHECKING

from roofline.backends.parallel.executable import ParallelExecutable, Watch
from roofline.backends.parallel.ranks import Ranks
from roofline.backends.reference.executable import ReferenceExecutable, digest_of
from roofline.backends.reference.sampling import sample
from roofline.backends.reference.weights import Checkpoint
from roofline.backends.sampling import Sampled, SampleRows
from roofline.models.config import ModelConfig
from roofline.models.registry import get
from roofline.ops.batch import BatchLimits
from roofline.program.compile import compile_program
from roofline.program.target import Target
from roofline.program.text import program_hash

if TYPE_CHECKING:
    from torch import Tensor


def reference_share(
    checkpoint: Checkpoint,
    config: ModelConfig,
    limits: BatchLimits,
    num_pages: int,
    max_context: int,
    threads: int,
    target: Target,
    ranks: Ranks,
) -> ReferenceExecutable:
    """What this rank has of a checkpoint, computed by so many threads. Raises CapacityError as `compile_program`."""
    import torch

    torch.set_num_threads(threads)
    program = compile_program(get(config.family), config, checkpoint.tensors, target, share=ranks.share)
    return ReferenceExecutable(program, checkpoint.read, limits, num_pages, max_context, group=ranks)


def parallel_reference(
    checkpoint: Checkpoint, config: ModelConfig, inner: ReferenceExecutable, target: Target, ranks: Ranks, watch: Watch
) -> ParallelExecutable:
    """Rank 0's executable over its share of the checkpoint."""
    full = compile_program(get(config.family), config, checkpoint.tensors, target)
    identity = f"reference {program_hash(full)} {digest_of(checkpoint)}"

    def sample_of(logits: "Tensor", rows: SampleRows) -> Sampled:
        return sample(logits.numpy(), rows)

    return ParallelExecutable(inner, ranks, identity=identity, vocab_size=config.vocab, sample=sample_of, watch=watch)
