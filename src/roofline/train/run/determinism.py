"""Everything that makes two runs on one machine give the same bits, in one place."""

import os

import torch

# Before the libraries start: cuBLAS's workspace, rocBLAS's atomics, and collectives that add in one order only.
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
    """Switch it on for this process, before anything computes.

    Not with warn_only: attention would keep its backward pass that adds in any order.
    """
    os.environ.update(_ENVIRONMENT)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
