"""roofline.torch: Hugging Face models in memory run and are served as they are. Needs torch; names load when used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roofline.torch.model import TorchModel, from_model

__all__ = ["TorchModel", "from_model"]

_HOMES = {"TorchModel": "roofline.torch.model", "from_model": "roofline.torch.model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roofline.torch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
