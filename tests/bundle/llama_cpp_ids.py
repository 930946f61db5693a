"""The ids of llama.cpp, run by an interpreter that has llama-cpp-python: `python llama_cpp_ids.py MODEL.gguf` reads a
JSON list of texts, and writes of each its ids where special tokens are plain text, and where they are not."""

import ctypes
import json
import sys

import llama_cpp as lib


def main(path: str) -> None:
    options = lib.llama_model_default_params()
    options.vocab_only = True
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), options)
    assert model, "llama.cpp does not load the file"
    vocab = lib.llama_model_get_vocab(model)

    def ids(text: str, parse: bool) -> list[int]:
        raw, room = text.encode(), len(text.encode()) + 16
        tokens = (ctypes.c_int32 * room)()
        count = lib.llama_tokenize(vocab, raw, len(raw), tokens, room, True, parse)
        assert count >= 0, text
        return list(tokens[:count])

    json.dump([[ids(text, parse) for parse in (False, True)] for text in json.load(sys.stdin)], sys.stdout)


main(*sys.argv[1:])
