"""What stands in place of a file by a common mistake, told by its first bytes, and what to do about it."""

import json
import re
from pathlib import Path

from roofline.common.errors import ConfigError

HEAD_BYTES = 4096  # that are looked at
PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # which torch writes as zip archives
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(?i)<!doctype html|<html|<\?xml[^>]*>\s*<error")
_OLLAMA = "application/vnd.ollama.image.model"


def mistaken_for(path: Path | str, may_be_page: bool = False) -> str:
    """Return what a file is in place of what was meant, with the remedy; "" where its first bytes do not tell.

    may_be_page: whether a page of HTML may be what was meant.
    """
    path = Path(path)
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return ""
    if not head:
        return "it is empty; get the file again"
    if head.startswith(_LFS):
        return "it is a Git LFS pointer, which stands for the file; run `git lfs pull` in its folder"
    if not may_be_page and _PAGE.match(head.lstrip(b"\xef\xbb\xbf \t\r\n")):
        return "it is a page that a server sent in place of the file; download it again, from the address of the file"
    if head.startswith(b"PK\3\4") and path.suffix not in PICKLES:
        return "it is a zip archive; unpack it, and name the file in it"
    if head.startswith(b"\x1f\x8b"):
        return "it is a gzip archive; unpack it, and name the file in it"
    if head.startswith(b"{") and _OLLAMA.encode() in head:
        return f"it is a manifest of Ollama's; name the file of its weights, {_weights_of(path)} in the folder blobs"
    return ""


def unreadable(path: Path | str, message: str) -> ConfigError:
    """Return the error about a file that cannot be read as what it should be: what it is by mistake where that can be
    told, else the message, which names the file."""
    mistake = mistaken_for(path)
    return ConfigError(f"{path}: {mistake}" if mistake else message)


def _weights_of(manifest: Path) -> str:
    """The name of the blob that a manifest of Ollama's says has the weights."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA)
        return str(digest).replace(":", "-")
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return "sha256-..."
