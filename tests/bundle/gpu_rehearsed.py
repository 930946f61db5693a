"""A tiny model on a chip that is not here: `rehearse` fills a folder with its kernels, `serve` runs steps from there.

Prints, as JSON, how many binaries were asked for and which of them did not lie there: [[kernel, signature], ...].
"""

import json
import sys
from pathlib import Path

import numpy as np
import triton

from roofline.backends.gpu.ahead import kernel_cache, model_steps
from roofline.backends.gpu.ahead import stub_driver as absent
from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
from roofline.backends.options import LoadOptions
from roofline.backends.sampling import SampleRows
from roofline.hardware.chips import chips
from roofline.models.config import ModelConfig
from roofline.ops.batch import BatchLimits, Segment
from roofline.weights.random_weights import random_checkpoint

CONFIG = {
    "family": "llama", "width": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 1024,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "rope_style": "half", "max_position": 2048,
    "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None,
}  # fmt: skip
TOKENS, RUNNING = 160, 12


def served(chip, checkpoint, options):
    """The model with its weights, on CPU tensors; a cache that is never touched takes no memory."""
    config = ModelConfig.of(checkpoint.config)
    program = compile_for_gpu(checkpoint, config, options, chip)
    limits = BatchLimits(tokens=TOKENS, segments=RUNNING, rows=RUNNING, pages=RUNNING * 128)
    (group,) = program.kv_groups.values()
    pages = (6 << 30) // (16 * group.token_bytes)  # 3 GiB of k, as much of v
    runtime = Runtime(chip, "cpu", graphs=False)
    return GpuExecutable(
        program, checkpoint.read, runtime, limits=limits, num_pages=pages, max_context=2048, weights_hash=""
    )


def segments(rng):
    """A step as a scheduler may make it: decodes, drafts, chunks, in any mixture."""
    left, step = TOKENS, []
    for _ in range(rng.integers(1, RUNNING + 1)):
        longest = int(rng.choice([1, 1, 1, 4, 40, TOKENS]))
        count = int(rng.integers(1, min(longest, left) + 1))
        first = int(rng.choice([0, rng.integers(0, 2048 - count)]))
        step.append(Segment([7] * count, first, [0] * -(-(first + count) // 16)))
        left -= count
        if not left:
            break
    return step


def samplings(rng, rows):
    """What the rows of a step may ask for."""
    some = SampleRows.greedy(rows)
    some.temperature[:] = rng.random(rows) < 0.5
    some.top_k[:] = rng.integers(0, 2) * 5
    some.logprobs[:] = rng.integers(-1, 3)
    if rng.random() < 0.5:
        ends = np.cumsum(rng.integers(0, 5, rows)).astype(np.int32)
        some.hist_start[1:] = ends
        some.hist_ids, some.hist_counts = np.zeros(ends[-1], np.int32), np.ones(ends[-1], np.int32)
    if rng.random() < 0.3:
        some.mask = np.zeros((rows, 1024 // 32), np.uint32)
    return some


def main(mode, chip_name, form, kv_dtype, activations, folder):
    chip = chips.get(chip_name)
    absent.install(chip)
    kernel_cache.use(Path(folder))
    asked = []

    def listen(*, src, cache_hit, **rest):
        asked.append((src.name, str(src.signature) + str(src.attrs) + str(src.constants), cache_hit))

    triton.knobs.compilation.listener = listen
    checkpoint = random_checkpoint(CONFIG, seed=3, form=form)
    options = LoadOptions(backend="gpu", kv_cache_dtype=kv_dtype, activations=activations)
    if mode == "rehearse":
        executable = model_steps.executable_without_memory(checkpoint, chip, options, (TOKENS, RUNNING))
        model_steps.run_steps(executable)
    else:
        executable, rng = served(chip, checkpoint, options), np.random.default_rng(5)
        for _ in range(150):
            step = segments(rng)
            executable.batch.fill(step, (np.cumsum([len(each.ids) for each in step]) - 1).tolist())
            executable.forward()
            executable.sample(samplings(rng, len(step)))
    print(json.dumps({"asked": len(asked), "new": [words[:2] for words in asked if not words[2]]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
