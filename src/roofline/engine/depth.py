"""How much more a token of a prompt costs the further back it stands, by the operations that the model has for it."""

from roofline.backends.base import Executable
from roofline.ops.batch import PAGE_TOKENS, Segment

# Attention reaches a smaller share of a chip's arithmetic than products with quantised weights do, so its operations
# count twice. SmolLM2-135M on a Zen 4: by operations a token costs twice as much at position 3,000, measured at 1,750.
ATTENTION_WEIGHT = 2


def doubling_depth(executable: Executable) -> int | None:
    """Return the position at which a token of a prompt costs twice what one at the beginning costs.

    None where it costs the same everywhere, as without attention. Writes to the executable's buffer, but computes
    nothing. With windows of attention it is that of the line from the beginning to the longest context.
    """
    count = min(PAGE_TOKENS, executable.limits.tokens)
    pages = min(executable.num_pages, executable.limits.pages, executable.max_context // PAGE_TOKENS)
    depth = pages * PAGE_TOKENS - count
    if depth <= 0:
        return None
    first = _operations(executable, count, 0)
    surplus = ATTENTION_WEIGHT * (_operations(executable, count, depth) - first)
    return max(1, round(depth * first / surplus)) if surplus > 0 else None


def _operations(executable: Executable, count: int, position: int) -> float:
    """FLOPs of a step that computes `count` tokens of one prompt from `position` on, and no logits."""
    pages = [0] * -(-(position + count) // PAGE_TOKENS)
    executable.batch.fill([Segment([0] * count, position, pages)], [])
    return executable.step_cost().flops
