"""How long a step takes while some of its layers are copied to the device in time for their turn: a small simulation.

One engine copies, one computes. A copy starts when the one before it is done and its buffer's last reader is; a layer
starts when the one before it is done and its own copy is.
"""

from collections.abc import Mapping, Sequence


def spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of `layers` layers, as evenly as possible, so that each copy has about as many layers to hide behind."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def step_seconds(compute: Sequence[float], copies: Mapping[int, float], buffers: int) -> float:
    """Seconds from one step's end to the next one's, when step follows step.

    Args:
        compute: seconds of each layer.
        copies: layer -> seconds of its copy, for layers that live on the host.
        buffers: on the device, each of which holds one layer; with as many as layers on the host none is copied twice.
    """
    if not copies or len(copies) <= buffers:
        return sum(compute)
    assert buffers >= 1, "a layer is computed where it was copied to"
    now = copied = 0.0  # when the computing and the copying engine are free
    read = [0.0] * buffers  # when each buffer's last reader is done
    turn, ends = 0, []
    for _ in range(4 * buffers):  # what buffer a layer finds repeats after at most `buffers` steps
        for layer, seconds in enumerate(compute):
            ready = 0.0
            if layer in copies:
                buffer = turn % buffers
                copied = ready = max(copied, read[buffer]) + copies[layer]
                turn += 1
            now = max(now, ready) + seconds
            if layer in copies:
                read[buffer] = now
        ends.append(now)
    return (ends[-1] - ends[-1 - buffers]) / buffers
