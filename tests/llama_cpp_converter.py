"""llama.cpp's own converter of Hugging Face's folders, in a process that stays for as many as are converted.

It lies in build/llama.cpp, where `python -m tools.llama_cpp_source` puts it. As a program: `python
llama_cpp_converter.py SOURCE` reads lines of JSON (folder, out, and the fields of `Settings`) and answers a line for
each: the error, or "".
"""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """dtype: of matrices; vocab_only: tokenizer and no tensors; split: the tensors that a file may hold, 0: all; base:
    of a LoRA adapter, the folder of its model.

    The vocabulary of a model is converted as one of bytes, whatever its family: the converter knows pre-tokenizers by
    hashes of what published ones answer, and no small one is among them. With vocab_only nothing is changed.
    """

    dtype: str = "f32"
    vocab_only: bool = False
    split: int = 0
    base: str = ""


def _convert(folder: Path, out: Path, settings: Settings) -> None:
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    # transformers 5 drops keys of published files that the converter reads; version 4, for which it is, does not.
    fields = json.loads((folder / "config.json").read_text()) | ModelBase.load_hparams(folder, False)
    kind: Any = get_model_class(get_model_architecture(fields, ModelType.TEXT))
    known = TextModel.get_vocab_base_pre
    if not settings.vocab_only:
        kind = type(kind.__name__, (kind,), {"model_arch": kind.model_arch})
        kind.set_vocab, TextModel.get_vocab_base_pre = _set_vocab, lambda self, tokenizer: "gpt-2"
    try:
        _write(kind, folder, out, settings, fields)
    finally:
        TextModel.get_vocab_base_pre = known


def _convert_adapter(source: Path, folder: Path, out: Path, settings: Settings) -> None:
    sys.argv = ["convert", str(folder), "--base", settings.base, "--outfile", str(out), "--outtype", settings.dtype]
    runpy.run_path(str(source / "convert_lora_to_gguf.py"), run_name="__main__")


def _set_vocab(model: Any) -> None:
    model._set_vocab_gpt2()
    if "type_vocab_size" in model.hparams:  # of encoders
        model.gguf_writer.add_token_type_count(model.hparams["type_vocab_size"])


def _write(kind: Any, folder: Path, out: Path, settings: Settings, fields: dict[str, Any]) -> None:
    import gguf
    import torch

    kinds = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
    with torch.inference_mode():
        form = gguf.LlamaFileType[kinds[settings.dtype]]
        model = kind(folder, form, out, hparams=fields, split_max_tensors=settings.split)
        model.write_vocab() if settings.vocab_only else model.write()


def _serve(source: str) -> None:
    sys.path[:0] = [source, str(Path(source, "gguf-py"))]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the converter prints is no answer
    for line in sys.stdin:
        call, error = json.loads(line), ""
        try:
            folder, out, settings = Path(call.pop("folder")), Path(call.pop("out")), Settings(**call)
            if settings.base:
                _convert_adapter(Path(source), folder, out, settings)
            else:
                _convert(folder, out, settings)
        except (Exception, SystemExit) as mistake:  # of any kind: the test shows it
            error = f"{type(mistake).__name__}: {mistake}"
        print(json.dumps(error), file=answers)


class Converter:
    """Runs this file as a program until `close`. Skips the test where the converter is not there."""

    def __init__(self) -> None:
        import pytest  # as a program, this file needs neither pytest nor the tools' folder

        from tests.judges import require
        from tools.llama_cpp_source import FOLDER

        require("xllamacpp")  # it comes with the other judges, in whose run all of these tests are
        if not FOLDER.is_dir():
            pytest.skip(f"{FOLDER} is not here: python -m tools.llama_cpp_source")
        call, pipe = [sys.executable, __file__, str(FOLDER)], subprocess.PIPE
        self._program = subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def convert(self, folder: Path, out: Path, settings: Settings | None = None) -> Path:
        """Write a folder's model as a GGUF file, and return its path. Fails the test with the converter's error."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        call = {"folder": str(folder), "out": str(out), **asdict(settings or Settings())}
        self._program.stdin.write(json.dumps(call) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        assert answer == '""\n', f"llama.cpp's converter: {answer or 'it has ended'}"
        return out

    def close(self) -> None:
        """End the program."""
        self._program.communicate(timeout=60)


if __name__ == "__main__":
    _serve(sys.argv[1])
