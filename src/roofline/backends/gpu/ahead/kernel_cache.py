"""Where compiled kernels lie: the folder that `roofline kernels --build` fills and that launches read.

It is Triton's own cache, so a launch finds what was built where all that goes into Triton's key is the same: the
kernel's text and the line it begins in, types, constants and alignments of its arguments, the tile, the chip, Triton
itself (every byte of it), and Triton's switches in the environment. For AMD the path that Triton is installed under
goes in too, and the entries name each other by absolute paths: build where you run, or in an image with the same paths.
"""

from pathlib import Path

from roofline.common import env


def folder() -> Path:
    """TRITON_CACHE_DIR where that is set, else kernels/ in the folder that we keep everything in."""
    chosen = env.foreign("TRITON_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else env.home() / "kernels"


def use(path: Path | None = None) -> Path:
    """Make this process's launches look there, folder() if nothing is named; before the first launch."""
    import triton

    chosen = path or folder()
    triton.knobs.cache.dir = str(chosen)
    return chosen
