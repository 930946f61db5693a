"""Gets what llama.cpp has beside its library: the converter of models, chat templates, vocabularies.

python -m tools.llama_cpp_source       # into build/llama.cpp; where it cannot be had, that is said and tests skip

They come from the source archive of llama-cpp-python (MIT), which holds llama.cpp's. 77 MB are downloaded, and 77 MB of
files stay. What is there already is left.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
FOLDER = Path(__file__).parents[1] / "build" / "llama.cpp"
SECONDS = 200.0
_PARTS = ("LICENSE", "conversion/", "convert_lora_to_gguf.py", "gguf-py/gguf/", "models/templates/")
_PARTS += ("models/ggml-vocab-",)


def main() -> int:
    """Always 0: without a network there is no such folder."""
    try:
        get(SECONDS)
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"{FOLDER.name}: not here: {error}", file=sys.stderr)
    return 0


def get(seconds: float) -> None:
    """Fill the folder unless it is there. Raises OSError, SubprocessError, TarError where the archive cannot be had."""
    if FOLDER.is_dir():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as work:
        call = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            PACKAGE.partition("=")[0],
        ]
        subprocess.run([*call, PACKAGE], cwd=work, check=True, capture_output=True, timeout=max(1.0, seconds))
        (archive,) = Path(work).glob("*.tar.gz")
        with tarfile.open(archive) as members:
            for member in members:
                _, inside, name = member.name.partition("/vendor/llama.cpp/")
                if inside and member.isfile() and name.startswith(_PARTS):
                    members.extract(member.replace(name=f"llama.cpp/{name}"), work, filter="data")
        shutil.move(Path(work) / "llama.cpp", FOLDER)
    print(f"{FOLDER.name}: {sum(file.is_file() for file in FOLDER.rglob('*'))} files")


if __name__ == "__main__":
    sys.exit(main())
