"""llama.cpp as a judge: its logits and its token ids, computed in a process of its own.

The library is the one inside the package xllamacpp, whose wheel exports llama.cpp's C interface; llama-cpp-python would
have to be compiled for minutes. `make test-judges` installs the pinned version. As a program, `python llama_cpp.py`
opens it once and reads lines of JSON: a job's name, its words and its texts. It does each in a process forked from it,
which a mistake of llama.cpp's may end, and answers a line: the end of what that said where it failed, or null. Jobs:
logits MODEL.gguf OUT.npy 3,1,4 [ADAPTER.gguf] writes float32 [tokens, vocab] of these ids,
hidden MODEL.gguf OUT.npy 3,1,4 writes an encoder's float32 [tokens, width], and
tokenize MODEL.gguf OUT.json writes a list of ids for each text.
"""

import ctypes as c
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np


class ModelParams(c.Structure):
    """The beginning of llama_model_params (llama.h, build 11549), and room for what follows it."""

    _fields_ = (
        ("devices", c.c_void_p), ("buffer_overrides", c.c_void_p), ("gpu_layers", c.c_int32),
        ("split_mode", c.c_int32), ("load_mode", c.c_int32), ("lazy_mode", c.c_int32), ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p), ("progress", c.c_void_p), ("progress_data", c.c_void_p),
        ("key_overrides", c.c_void_p), ("vocab_only", c.c_bool), ("remainder", c.c_byte * 119),
    )  # fmt: skip


class ContextParams(c.Structure):
    """The beginning of llama_context_params, and room for what follows it."""

    _fields_ = (
        *((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max")),
        *((name, c.c_int32) for name in ("n_outputs_max_per_seq", "n_threads", "n_threads_batch", "ctx_type")),
        *((name, c.c_int32) for name in ("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type")),
        ("rope", c.c_float * 6), ("yarn_orig_ctx", c.c_uint32), ("defrag_thold", c.c_float),
        ("eval_callback", c.c_void_p), ("eval_data", c.c_void_p), ("type_k", c.c_int32), ("type_v", c.c_int32),
        ("remainder", c.c_byte * 120),
    )  # fmt: skip


class Batch(c.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c.c_int32), ("token", c.POINTER(c.c_int32)), ("embd", c.c_void_p), ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)), ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )  # fmt: skip


def library_path() -> Path:
    """Return the place of the library inside xllamacpp."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"))


def open_library(path: Path) -> c.CDLL:
    """Open a library of llama.cpp; asserts that its records lie as they are declared here."""
    lib = c.CDLL(str(path))
    pointer, text = c.c_void_p, c.c_char_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llama_model_default_params": (ModelParams, ()),
        "llama_context_default_params": (ContextParams, ()),
        "llama_model_load_from_file": (pointer, (text, ModelParams)),
        "llama_init_from_model": (pointer, (pointer, ContextParams)),
        "llama_adapter_lora_init": (pointer, (pointer, text)),
        "llama_set_adapters_lora": (c.c_int32, (pointer, pointer, c.c_size_t, pointer)),
        "llama_batch_init": (Batch, (c.c_int32, c.c_int32, c.c_int32)),
        "llama_decode": (c.c_int32, (pointer, Batch)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_vocab_n_tokens": (c.c_int32, (pointer,)),
        "llama_get_logits": (pointer, (pointer,)),
        "llama_set_embeddings": (None, (pointer, c.c_bool)),
        "llama_encode": (c.c_int32, (pointer, Batch)),
        "llama_get_embeddings": (pointer, (pointer,)),
        "llama_model_n_embd": (c.c_int32, (pointer,)),
        "llama_tokenize": (c.c_int32, (pointer, text, c.c_int32, pointer, c.c_int32, c.c_bool, c.c_bool)),
        "llama_get_memory": (pointer, (pointer,)),
        "llama_memory_clear": (None, (pointer, c.c_bool)),
        "llama_synchronize": (None, (pointer,)),
        "llama_print_system_info": (text, ()),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    usual = lib.llama_context_default_params()
    layout = (usual.n_ctx, usual.n_batch, usual.n_ubatch, usual.flash_attn_type, usual.type_k, usual.type_v)
    assert layout == (512, 2048, 512, -1, 1, 1), f"this version of llama.cpp has another llama_context_params: {layout}"
    lib.llama_backend_init()
    return lib


def open_model(lib: c.CDLL, path: str, vocabulary_only: bool = False) -> int:
    """Load a GGUF file; asserts that llama.cpp takes it."""
    options = lib.llama_model_default_params()
    options.vocab_only = vocabulary_only
    model = lib.llama_model_load_from_file(path.encode(), options)
    assert model, "llama.cpp does not load the file"
    return model


def _context(lib: c.CDLL, model: int) -> int:
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0  # float32
    options.flash_attn_type = options.pooling_type = 0  # off
    context = lib.llama_init_from_model(model, options)
    assert context, "llama.cpp makes no context"
    return int(context)


def _batch(lib: c.CDLL, ids: list[int]) -> Batch:
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, True
        batch.seq_id[at][0] = 0
    return batch  # type: ignore[no-any-return]


def _save(out: str, values: int, rows: int, width: int) -> None:
    np.save(out, np.frombuffer(c.string_at(values, 4 * rows * width), np.float32).reshape(rows, width))


def _write_hidden(lib: c.CDLL, path: str, out: str, words: str) -> None:
    ids = [int(word) for word in words.split(",")]
    model = open_model(lib, path)
    context = _context(lib, model)
    lib.llama_set_embeddings(context, True)
    assert lib.llama_encode(context, _batch(lib, ids)) == 0, "llama.cpp does not compute"
    _save(out, lib.llama_get_embeddings(context), len(ids), lib.llama_model_n_embd(model))


def _write_logits(lib: c.CDLL, path: str, out: str, words: str, adapter: str = "") -> None:
    ids = [int(word) for word in words.split(",")]
    model = open_model(lib, path)
    context = _context(lib, model)
    if adapter:
        lora = lib.llama_adapter_lora_init(model, adapter.encode())
        assert lora, "llama.cpp does not load the adapter"
        loras, scales = (c.c_void_p * 1)(lora), (c.c_float * 1)(1.0)
        assert lib.llama_set_adapters_lora(context, loras, 1, scales) == 0, "llama.cpp does not take the adapter"
    assert lib.llama_decode(context, _batch(lib, ids)) == 0, "llama.cpp does not compute"
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    _save(out, lib.llama_get_logits(context), len(ids), vocab)


def _write_ids(lib: c.CDLL, path: str, out: str, texts: list[dict[str, Any]]) -> None:
    vocab = lib.llama_model_get_vocab(open_model(lib, path, vocabulary_only=True))
    lists = []
    for entry in texts:
        text = entry["text"].encode()
        ids = (c.c_int32 * (2 * len(text) + 8))()
        count = lib.llama_tokenize(vocab, text, len(text), ids, len(ids), entry["add_special"], entry["parse_special"])
        assert count >= 0, "llama.cpp does not tokenize"
        lists.append(ids[:count])
    Path(out).write_text(json.dumps(lists))


JOBS: dict[str, Callable[..., None]] = {"logits": _write_logits, "hidden": _write_hidden, "tokenize": _write_ids}
SECONDS = 100  # that a job may take


def _serve() -> None:
    """Do the jobs that standard input names, until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    lib = open_library(library_path())
    for line in sys.stdin:
        name, words = json.loads(line)
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                signal.alarm(SECONDS)
                os.dup2(said.fileno(), 2)
                os._exit(_do(lib, name, words))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            text = said.read().decode(errors="replace")[-2000:]
        print(json.dumps(f"{name} ended with {status}: {text}" if status else None), file=answers)


def _do(lib: c.CDLL, name: str, words: list[Any]) -> int:
    """The exit code of a job; what went wrong is printed."""
    try:
        JOBS[name](lib, *words)
    except BaseException:  # of any kind: the test shows it
        traceback.print_exc()
        return 1
    return 0


class LlamaCpp:
    """Runs this file as a program until `close`. Skips the test where xllamacpp is not installed."""

    def __init__(self) -> None:
        from tests.judges import require  # as a program, this file has neither pytest nor the tests' folder

        require("xllamacpp")
        call, pipe = [sys.executable, __file__], subprocess.PIPE
        # Where it ends itself it would ask a debugger for its calls, which takes that one four seconds.
        quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        self._program = subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=quiet)

    def _run(self, name: str, *words: object) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps([name, words]) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        assert answer == "null\n", f"llama.cpp: {answer or 'the program has ended'}"

    def close(self) -> None:
        """End the program."""
        self._program.communicate(timeout=60)

    def logits(self, file: Path, ids: list[int], *adapter: Path) -> np.ndarray:
        """Return the logits of a GGUF file's model, float32 [ids, vocab]."""
        out = file.with_suffix(".npy")
        self._run("logits", str(file), str(out), ",".join(map(str, ids)), *map(str, adapter))
        return np.load(out)

    def hidden(self, file: Path, ids: list[int]) -> np.ndarray:
        """Return the rows of a GGUF file's encoder, float32 [ids, width]."""
        out = file.with_suffix(".npy")
        self._run("hidden", str(file), str(out), ",".join(map(str, ids)))
        return np.load(out)

    def token_ids(
        self, file: Path, texts: list[str], out: Path, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text; `out` is a scratch file."""
        entries = [{"text": text, "add_special": add_special, "parse_special": parse_special} for text in texts]
        self._run("tokenize", str(file), str(out), entries)
        return json.loads(out.read_text())


if __name__ == "__main__":
    _serve()
