"""roofline.torch: Hugging Face models in memory run and are served as they are; our kernels as operators of torch.

Needs torch; names load when they are first used, the operators (torch.ops.roofline) with `roofline.torch.ops`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roofline.torch.linear import PackedLinear, quantize_linears
    from roofline.torch.model import TorchModel, from_model
    from roofline.torch.serving import serve

__all__ = ["PackedLinear", "TorchModel", "from_model", "quantize_linears", "serve"]

_HOMES = {
    "PackedLinear": "roofline.torch.linear",
    "quantize_linears": "roofline.torch.linear",
    "TorchModel": "roofline.torch.model",
    "from_model": "roofline.torch.model",
    "serve": "roofline.torch.serving",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'roofline.torch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
