"""libroofline, the C library: it lies beside the native module, installed or built."""

from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import UnsupportedError


@dataclass(frozen=True)
class LibraryFiles:
    """The shared library, and the folder of its header."""

    library: Path
    include: Path


def library_files() -> LibraryFiles:
    """Raises UnsupportedError where this installation has none."""
    from roofline import _native

    # A module that is linked into the source tree lies where it was built, and so does the library.
    folder = Path(_native.__file__).resolve().parent
    files = LibraryFiles(folder / "libroofline.so", folder / "include")
    if not (files.library.is_file() and (files.include / "roofline.h").is_file()):
        build = ["cmake -DROOFLINE_PYTHON=OFF (docs/how-to/library.md)"]
        raise UnsupportedError("the C library", f"there is no libroofline.so in {folder}", build)
    return files
