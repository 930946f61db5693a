"""Which GPUs the installed torch was built for, read without importing it."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from roofline.common.files import text_of

PLATFORMS = {"amd": "rocm", "nvidia": "cuda", "intel": "xpu"}


@dataclass(frozen=True)
class Wheel:
    """version: of torch; platform: "cuda", "rocm", "xpu" or "cpu", "" where nothing says it."""

    version: str
    platform: str


def installed(package: str = "torch") -> Wheel | None:
    """The installed torch, None where there is none.

    A wheel of torch's own index says its platform in its version ("2.9.0+rocm6.4"); one of PyPI says nothing there,
    but, as every wheel does, in torch/version.py, which is read as text.
    """
    try:
        torch = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    if match := re.search(r"\+(rocm|cpu|xpu|cu(?=\d))", torch.version):
        return Wheel(torch.version, "cuda" if match[1] == "cu" else match[1])
    return Wheel(torch.version, _platform(text_of(Path(str(torch.locate_file(f"{package}/version.py"))))))


def _platform(text: str | None) -> str:
    """The platform that the text of torch/version.py names, where `hip`, `cuda` and `xpu` are versions or None."""
    pattern = r"""^(hip|cuda|xpu)\b[^=\n]*= *(?:None|['"](.*)['"])"""
    versions = dict(re.findall(pattern, text or "", re.MULTILINE))
    platforms = {"hip": "rocm", "cuda": "cuda", "xpu": "xpu"}
    unnamed = "cpu" if "cuda" in versions else ""
    return next((platform for name, platform in platforms.items() if versions.get(name)), unnamed)
