"""Code of bundles that lies, with a right checksum: what it is refused or run as, and whether a process dies of it.

`python tests/backends/crafted_code.py --tries 100000 --seed 1` tries so many in child processes, a new one after a
crash, and prints every try that was not refused or run as it should be.
"""

import argparse
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from cpu_models import checkpoint, packed

from roofline.backends.capacity import Capacity
from roofline.backends.cpu.executable import CpuExecutable, CpuModel
from roofline.backends.cpu.lowered import from_bytes, to_bytes
from roofline.backends.sampling import SampleRows
from roofline.common.errors import RooflineError
from roofline.models import registry
from roofline.ops.batch import BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program
from tests.backends import hybrid_models, shaped_models

LIMITS = BatchLimits(tokens=48, segments=4, rows=6, pages=32, state_slots=4)
PAGES = 16
MODELS = (  # and the format of their weights and of their cache
    ("llama", "Q8_0", "bf16"),
    ("mistral", "F32", "bf16"),
    ("qwen3", "Q4_K", "int8"),
    ("mpt", "BF16", "bf16"),
    ("opt", "Q4_0", "bf16"),
    ("ministral3", "Q4_0", "bf16"),
    ("arcee", "Q4_0", "bf16"),
    ("mpt-alibi", "Q4_0", "int8"),
    ("mixtral", "Q4_0", "bf16"),
    ("qwen2-moe", "F32", "bf16"),
    ("gemma2", "Q4_0", "int8"),
    ("gpt-oss", "Q4_0", "bf16"),
    ("deepseek", "Q4_0", "bf16"),
    ("bert", "Q4_0", "bf16"),
    ("plain", "Q4_0", "bf16"),
    ("shifted", "Q4_0", "bf16"),
    ("sharing", "Q4_0", "bf16"),
    ("styles", "Q4_0", "int8"),
    ("scan", "Q4_0", "bf16"),
    ("rates", "Q4_0", "bf16"),
)
HEAD = 56  # bytes before what the checksum is of
ENDS = (0, 1, -1, 2, 3, 15, 64, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))


@dataclass
class Subject:
    """A model as it would be bundled: its executable, and its code.bin."""

    name: str
    executable: CpuExecutable
    code: bytes


def subject(name: str, form: str, kv_dtype: str) -> Subject:
    from roofline import _native

    modules = [module for module in (hybrid_models, shaped_models) if name in module.MODELS]
    source = (modules[0].checkpoint if modules else checkpoint)(name, form)
    family, config = registry.configure(source.config)
    program = compile_program(family, config, source.tensors, target.with_cache(target.CPU, kv_dtype))
    made = packed(program, source, Capacity(LIMITS, 128, PAGES), isa=_native.isas()[0], threads=1)
    return Subject(name, made, to_bytes(made._model.lowered, made._model.identity, _native.versions()))


def crafted(code: bytes, random: Random) -> bytes:
    """One to three of its numbers changed, and the checksum right."""
    numbers = list(struct.unpack(f"<{len(code) // 8}q", code))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(HEAD // 8, len(numbers) if random.random() < 0.8 else 40)
        old = numbers[at]
        near = numbers[min(len(numbers) - 1, at + random.choice((-4, -1, 1, 4, 24)))]
        close = (old + 1, old - 1, old + 16, old + 64, old - 64, old * 2, old // 2)
        choices = (*ENDS, near, near, random.choice(close), random.choice(close), random.getrandbits(63))
        numbers[at] = max(-(1 << 63), min((1 << 63) - 1, random.choice(choices)))
    body = struct.pack(f"<{len(numbers)}q", *numbers)
    return body[: HEAD - 8] + struct.pack("<q", zlib.crc32(body[HEAD:])) + body[HEAD:]


def attempt(of: Subject, code: bytes) -> str:
    """What came of code.bin: "run", or why it was refused. Raises anything else, and AssertionError where memory
    behind the arena or the cache was written."""
    from roofline import _native

    model = of.executable._model
    try:
        lowered, identity = from_bytes(code, _native.versions())
        if lowered.nbytes != model.lowered.nbytes:
            return "another image"  # whose file has not that size
        lies = CpuModel(lowered, identity, model.prices, model.program, model.kv_dtype)
        isa = of.executable.isa
        made = CpuExecutable(lies, of.executable.image, Capacity(LIMITS, 128, PAGES), isa=isa, threads=1)
    except RooflineError as error:
        return str(error)
    except MemoryError:
        return "no memory"
    for segments, rows in steps():
        made.batch.fill(segments, rows)
        made.forward()
        made.sample(choosing(len(rows), made.vocab_size))
    constant, per_token, per_row = lowered.arena
    ends = (constant + per_token * LIMITS.tokens + per_row * LIMITS.rows + 64, made.page_bytes * PAGES)
    for memory, end in zip((made._arena, made._cache, made._state), (*ends, made.slot_bytes * 4), strict=True):
        assert memory is None or not memory.view()[end:].any(), "written behind its end"
    made.close()
    return "run"


def steps() -> Iterator[tuple[list[Segment], list[int]]]:
    """The largest prefill, the largest decode, and both together up to the last position."""
    yield [Segment(list(range(48)), 0, [0, 1, 2])], [0, 1, 2, 3, 46, 47]
    yield [Segment([5 + i], 48, [3 * i, 3 * i + 1, 3 * i + 2, 12 + i]) for i in range(4)], [0, 1, 2, 3]
    yield [Segment([7] * 30, 98, list(range(8))), Segment([8], 127, list(range(8, 16)))], [28, 29, 30]


def choosing(rows: int, vocab: int) -> SampleRows:
    """Rows with every control of sampling on."""
    made = SampleRows.greedy(rows)
    made.temperature[1:], made.top_k[:], made.top_p[:], made.min_p[:] = 0.7, 7, 0.9, 0.01
    made.repetition[:], made.presence[:], made.logprobs[:] = 1.1, 0.1, 20
    made.hist_start, made.hist_ids = np.arange(rows + 1, dtype=np.int32), np.full(rows, vocab - 1, np.int32)
    made.hist_counts = np.ones(rows, np.int32)
    return made


def run(of: Subject, seed: int, first: int, last: int, state: mmap.mmap) -> None:
    """The tries of a child process; `state` holds the number of the one in hand, and how many ran and were refused."""
    ran, refused = struct.unpack_from("<qq", state, 8)
    for index in range(first, last):
        code = crafted(of.code, Random(f"{seed} {of.name} {index}"))
        struct.pack_into("<qqq", state, 0, index, ran, refused)
        try:
            came = attempt(of, code)
        except BaseException as error:
            print(f"{of.name} seed {seed} try {index}: {type(error).__name__}: {error}", flush=True)
            os._exit(3)
        ran, refused = ran + (came == "run"), refused + (came != "run")
    struct.pack_into("<qqq", state, 0, last, ran, refused)
    os._exit(0)


def tries(of: Subject, seed: int, count: int) -> tuple[int, int, int]:
    """How many of the tries ran, were refused, and were neither."""
    state, failed, first = mmap.mmap(-1, 24), 0, 0
    while first < count:
        child = os.fork()
        if child == 0:
            run(of, seed, first, count, state)
        _, status = os.waitpid(child, 0)
        index, ran, refused = struct.unpack_from("<qqq", state)
        if status != 0:
            failed += 1
            if os.WIFSIGNALED(status):
                print(f"{of.name} seed {seed} try {index}: signal {os.WTERMSIG(status)}", flush=True)
        first = index + (status != 0)
    return ran, refused, failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failures = 0
    for name, form, kv_dtype in MODELS:
        of = subject(name, form, kv_dtype)
        assert attempt(of, of.code) == "run"
        ran, refused, failed = tries(of, options.seed, options.tries // len(MODELS))
        print(f"{name} {form}: {ran} ran, {refused} refused, {failed} failed", flush=True)
        failures += failed
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
