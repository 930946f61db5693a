"""What tests of whole models on the gpu backend share: a small shape, its steps, how results are compared."""

import numpy as np

from roofline.ops.batch import BatchLimits, Segment

LLAMA = {
    "family": "llama", "width": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "vocab": 300,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "rope_style": "half", "max_position": 512,
    "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None,
}  # fmt: skip
LIMITS = BatchLimits(tokens=64, segments=4, rows=8, pages=64)


def steps(seed=0):
    """A chunk, a decode and another chunk, two decodes."""
    ids = np.random.default_rng(seed).integers(0, 300, 40).tolist()
    return [
        [Segment(ids[:21], 0, [3, 7])],
        [Segment(ids[21:22], 21, [3, 7]), Segment(ids[:17], 0, [1, 5])],
        [Segment(ids[22:23], 22, [3, 7]), Segment(ids[17:18], 17, [1, 5])],
    ]


def logits(executable, step):
    """Those of the last token of each segment."""
    ends = np.cumsum([len(segment.ids) for segment in step]) - 1
    executable.batch.fill(step, ends.tolist())
    executable.forward()
    return np.array(executable.logits())


def distance(got, want):
    """Of all values together, relative."""
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def exact_whole(gpu):
    """The logits of a text, after a check that they are the same in chunks and in company."""
    ids = np.random.default_rng(1).integers(0, 300, 20).tolist()
    whole = logits(gpu, [Segment(ids, 0, [0, 1])])
    logits(gpu, [Segment(ids[:9], 0, [2, 3])])
    chunked = logits(gpu, [Segment(ids[9:], 9, [2, 3]), Segment(ids[:5], 0, [4])])
    assert np.array_equal(whole[0], chunked[0])
    return ids, whole


def check_exact_steps(gpu):
    """Check that the bits of a text's logits do not depend on chunks, on single tokens, or on a prompt beside them."""
    ids, whole = exact_whole(gpu)
    logits(gpu, [Segment(ids[:16], 0, [5, 6])])
    for position in range(16, 20):
        alone = logits(gpu, [Segment(ids[position : position + 1], position, [5, 6])])
    assert np.array_equal(whole[0], alone[0])
    beside = logits(gpu, [Segment(ids[19:], 19, [5, 6]), Segment(ids[:18], 0, [7, 8])])  # of attention, two launches
    assert np.array_equal(whole[0], beside[0])


def time_ops(executable):
    """Run the step and return (op, seconds on the device) for each instruction."""
    executable.clocks(True)
    executable.forward()
    executable.clocks(False)
    return list(zip((instr.op for instr in executable.program.body), executable.op_seconds(), strict=True))
