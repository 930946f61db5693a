"""llama.cpp as a worker: python -m benchmarks.llama_cpp MODEL.gguf [--library libllama.so] [--threads 2].

A line read is {"workload": KEY}, a line written {"seconds"}, as of `benchmarks.ours`. The first line written says which
instruction sets the library uses. Without --library it is the one inside the package xllamacpp; that of npm's package
@node-llama-cpp/linux-x64 chooses among kernels for the chip, which lie beside it.
"""

import argparse
import ctypes as c
import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.host import streams
from roofline.bench.workloads import WARM_UP, WORKLOADS, token_ids
from tests.llama_cpp import Batch, ContextParams, library_path, open_library, open_model

TOKENS = 4096  # of a context
STEP = 512  # tokens of a step, as llama.cpp's own programs take by default
FLOAT16 = 1  # ggml's type of the cache, the default


class LlamaCppTimer:
    """Runs workloads of one sequence through llama.cpp's C interface."""

    def __init__(self, library: Path, model: Path, threads: int) -> None:
        for name in sorted(library.parent.glob("libggml.*so*")):
            # Its kernels are libraries that a program has to load.
            c.CDLL(str(name), mode=c.RTLD_GLOBAL).ggml_backend_load_all_from_path(str(library.parent).encode())
        self.lib = open_library(library)
        self.model = open_model(self.lib, str(model))
        options: ContextParams = self.lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = TOKENS, STEP, STEP
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = FLOAT16
        self.context = self.lib.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp makes no context"
        self.vocab = min(30_000, self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model)))
        self.batch: Batch = self.lib.llama_batch_init(STEP, 0, 1)

    def step(self, ids: Sequence[int], first: int) -> None:
        """Compute tokens at positions from `first`, with the logits of the last one."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, first + at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, at == len(ids) - 1
        assert self.lib.llama_decode(self.context, batch) == 0, "llama.cpp does not compute"
        self.lib.llama_synchronize(self.context)

    def prompt(self, count: int) -> None:
        """Compute a prompt from an empty context."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        ids = token_ids(count, 0, self.vocab)
        for first in range(0, count, STEP):
            self.step(ids[first : first + STEP], first)

    def seconds(self, key: str) -> float:
        """Return how long a workload of one sequence takes (a key of `WORKLOADS`)."""
        workload = WORKLOADS[key]
        self.prompt(WARM_UP)
        started = time.perf_counter()
        self.prompt(workload.prompt)
        if workload.kind == "decode":
            started = time.perf_counter()
            for at in range(workload.answer):
                self.step([17 + at], workload.prompt + at)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests, answers = streams()

    def write(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    timer = LlamaCppTimer(options.library or library_path(), options.model, options.threads)
    write({"system": timer.lib.llama_print_system_info().decode()})
    for line in requests:
        write({"seconds": timer.seconds(json.loads(line)["workload"])})


if __name__ == "__main__":
    main()
