"""The logits of llama.cpp, run by an interpreter that has llama-cpp-python:
`python llama_cpp_logits.py MODEL.gguf OUT.npy 3,1,4 [ADAPTER.gguf]` writes float32 [tokens, vocab] of these ids."""

import ctypes
import sys

import llama_cpp as lib
import numpy as np


def main(path: str, out: str, words: str, adapter: str = "") -> None:
    ids = [int(word) for word in words.split(",")]
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    assert model, "llama.cpp does not load the file"
    options = lib.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 256
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = 0  # float32
    options.flash_attn_type = 0  # off
    context = lib.llama_init_from_model(model, options)
    assert context, "llama.cpp makes no context"
    if adapter:
        lora = lib.llama_adapter_lora_init(model, adapter.encode())
        assert lora, "llama.cpp does not load the adapter"
        assert lib.llama_set_adapter_lora(context, lora, 1.0) == 0, "llama.cpp does not take the adapter"
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, True
        batch.seq_id[at][0] = 0
    assert lib.llama_decode(context, batch) == 0, "llama.cpp does not compute"
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    logits = lib.llama_get_logits(context)
    flat = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * (len(ids) * vocab))).contents
    np.save(out, np.frombuffer(flat, np.float32).reshape(len(ids), vocab))


main(*sys.argv[1:])
