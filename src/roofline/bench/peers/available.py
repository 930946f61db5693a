"""What of torch and its neighbours this process has: which techniques can run here at all."""

import shutil
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from roofline.common.errors import UnsupportedError

PACKAGES = ("torch", "triton", "transformers", "xformers")
DEVICES = ("auto", "cpu", "cuda")  # torch's name for both vendors' GPUs is the last


@dataclass(frozen=True)
class Here:
    """device: "cpu" or "cuda"; name: the chip's; vendor: "amd" or "nvidia" of a GPU; versions: of the packages that are
    installed; compiler: whether torch.compile has what it calls on this device."""

    device: str
    name: str
    vendor: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    compiler: bool = True

    def has(self, package: str) -> bool:
        """Whether a package can be imported."""
        return package in self.versions


def here(device: str = "auto") -> Here:
    """Describe this process. device: "auto" takes the GPU that torch sees first, or the CPU.

    Raises UnsupportedError for another device, and where a GPU is asked for and torch sees none.
    """
    if device not in DEVICES:
        raise UnsupportedError(f"device {device!r}", "this bench does not know it", DEVICES)
    versions = {name: number for name in PACKAGES if (number := _version(name)) is not None}
    if "torch" in versions and device != "cpu":
        import torch

        if torch.cuda.is_available():
            vendor = "amd" if torch.version.hip else "nvidia"
            return Here("cuda", torch.cuda.get_device_name(), vendor, versions, compiler="triton" in versions)
    if device == "cuda":
        raise UnsupportedError("device 'cuda'", "torch sees no GPU in this process", ("cpu",))
    from roofline.hardware.detect import detect

    return Here("cpu", detect().chip, "", versions, compiler=any(map(shutil.which, ("c++", "g++", "clang++"))))


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:  # there, but not installed as a distribution
        return "unknown"
