"""Kernels run in Triton's interpreter on CPU tensors where there is no GPU; the bf16 product is mended here only.

The interpreter keeps bf16 as 16-bit integers and multiplies those in tl.dot; widened operands give the right product.
"""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreted():
    """Skips without triton; mends the interpreter's bf16 product."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: before any is imported
    triton = pytest.importorskip("triton", reason="triton is not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, wide(a), wide(b), *rest)

    builder.create_dot = create_dot
    yield triton
    builder.create_dot = original
    del os.environ["TRITON_INTERPRET"]
