"""Kernels run in Triton's interpreter on CPU tensors where there is no GPU; what it gets wrong is mended here only.

The interpreter keeps bf16 as 16-bit integers and multiplies those in tl.dot. Here operands are widened, and added up in
float64: a row's result then depends on that row alone, as on a chip, and not on how numpy cuts a product into blocks.
Its narrowing of floats cuts digits off (bf16) or loses a carry (8 bits); torch's rounds to nearest even as GPUs do. It
does not know MI300's 8 bits. In Triton 3.6 it takes an array of one element for a number, which numpy 2.4 refuses. And
it replaces the whole language anew for each call of a function inside a kernel, which took it two thirds of its time:
here once a launch. It computes for each sum of integers whether it overflows, and then does not look at that; and it
makes a table of all types whenever it needs the numpy type of one: neither is done here. gpu_shapes.py remembers its
shapes. A missing barrier changes none of its results: gpu_races.py finds those.
"""

import contextlib
import dataclasses
import inspect
import os
import sys
from pathlib import Path

import pytest

# Read when triton and when a kernel is imported: tests that run before these may import triton for torch.compile.
os.environ["TRITON_INTERPRET"] = "1"
with contextlib.suppress(ImportError):
    import triton.language  # noqa: F401
del os.environ["TRITON_INTERPRET"]

sys.path.insert(0, str(Path(__file__).parent))  # gpu_planted, which compiling processes import by name


@pytest.fixture(scope="session")
def races():
    """Watches every program of the interpreter; its count of barriers."""
    from gpu_races import Races

    return Races()


@pytest.fixture(scope="session", autouse=True)
def interpreted(races):
    """Skips without triton; mends the interpreter's bf16 product and its 8- and 16-bit floats."""
    os.environ["TRITON_INTERPRET"] = "1"
    triton = pytest.importorskip("triton", reason="triton is not installed")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np
    import torch
    import triton.language as tl
    from gpu_shapes import remember_shapes

    builder = interpreter.InterpreterBuilder
    create_dot, convert_float = builder.create_dot, interpreter._convert_float

    def wide(handle):
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def mended_dot(self, a, b, start, *rest):
        if np.issubdtype(a.data.dtype, np.integer) and a.dtype.scalar != tl.bfloat16:
            return create_dot(self, a, b, start, *rest)
        product = np.matmul(wide(a), wide(b)) + start.data
        return interpreter.TensorHandle(product.astype(start.data.dtype), start.dtype.scalar)

    floats = {
        tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz, tl.float8e5: torch.float8_e5m2,
    }  # fmt: skip
    integers = {8: np.int8, 16: np.int16, 32: np.int32}

    def mended_convert(data, source, target, rounding):
        """data of the type source as bits of target."""
        bits = torch.from_numpy(np.ascontiguousarray(data).view(integers[source.primitive_bitwidth]))
        narrow = bits.view(floats[source]).float().to(floats[target])
        integer = integers[target.primitive_bitwidth]
        return narrow.view(getattr(torch, integer.__name__)).numpy().view(f"u{integer.__name__}")

    patch_lang, patched, languages = interpreter._patch_lang, set(), {}

    def patch_once(function):
        """The languages that a call sees, interpreted until its scope is restored: none if its caller's are."""
        names = function.__globals__
        if id(names) not in languages:
            languages[id(names)] = {each for each in names.values() if inspect.ismodule(each) and each in (tl, tl.core)}
        seen = languages[id(names)]
        if seen <= patched:
            return interpreter._LangPatchScope()
        fresh, scope = seen - patched, patch_lang(function)
        patched.update(fresh)
        restore = scope.restore

        def restored():
            patched.difference_update(fresh)
            restore()

        scope.restore = restored
        return scope

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_of_any_numpy(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type_once(kind):
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    unchecked, options = interpreter.interpreter_builder, interpreter.interpreter_builder.options
    assert not options.debug, "what is computed of overflows is looked at"
    unchecked.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = numpy_type_once
    interpreter._patch_lang_tensor = patch_tensor_of_any_numpy
    interpreter._patch_lang = patch_once
    builder.create_dot, interpreter._convert_float = mended_dot, mended_convert
    tl.float8e4b8.to_ir = lambda builder: builder.get_fp8e4b8_ty()
    undo, forget_shapes = races.watch(builder), remember_shapes()
    yield triton
    undo()
    forget_shapes()
    builder.create_dot, interpreter._convert_float = create_dot, convert_float
    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_lang, patch_tensor
    interpreter._get_np_dtype, unchecked.options = numpy_type, options
    del tl.float8e4b8.to_ir
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def kernel_cache(request):
    """Binaries that later runs find again, as long as neither their source nor the compiler changes."""
    return Path(request.config.cache.mkdir("kernels"))


@pytest.fixture
def rows_alike(monkeypatch):
    """A row of the interpreter's products does not depend on where it lies, as on a GPU; numpy's BLAS has edges."""
    import numpy as np

    def matmul(a, b):
        out = np.zeros((a.shape[0], b.shape[1]), a.dtype)
        for i in range(a.shape[1]):
            out += a[:, i, None] * b[i]
        return out

    monkeypatch.setattr(np, "matmul", matmul)
