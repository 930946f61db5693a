"""Makes two runs on one machine give the same bits."""

import os

import torch

# To be set before the libraries start: cuBLAS's workspace, no atomics in rocBLAS, collectives with one order of sums.
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "ROCBLAS_DEFAULT_ATOMICS_MODE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "PYTORCH_TUNABLEOP_ENABLED": "0",
}


def deterministic() -> None:
    """Switch deterministic algorithms on in this process; to be called before anything is computed.

    torch's warn_only is no alternative: attention would keep a backward pass that adds in any order.
    """
    os.environ.update(_ENVIRONMENT)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
