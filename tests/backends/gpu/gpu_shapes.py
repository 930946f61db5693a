"""Shapes of Triton's tensors and types, which its interpreter makes and checks anew for each value that it computes.

A kernel has few shapes and its tests make millions of values. What follows from a shape alone is made once here; the
name of a type, which only messages show, when it is read.
"""

import math
from collections.abc import Callable


def remember_shapes() -> Callable[[], None]:
    """Patch the tensors and block types of Triton's language; the call that is returned undoes it."""
    from triton.language import core

    tensor, block_type = core.tensor, core.block_type
    plain_tensor, plain_block = tensor.__init__, block_type.__init__
    of_tensors, of_types = {}, {}  # the dimensions -> numel and shape, as the plain ones make them

    def tensor_init(this, handle, type):
        this.handle, this.type, this.dtype = handle, type, type.scalar
        sizes = (*type.shape.values,) if type.is_block() else ()
        known = of_tensors.get(sizes)
        if known is None:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            known = of_tensors[sizes] = core.constexpr(math.prod(sizes)), shape
        this.numel, this.shape = known

    def block_init(this, element_ty, shape):
        sizes = (*core._unwrap_shape(shape),)
        if sizes not in of_types:
            plain_block(this, element_ty, shape)  # which refuses shapes that cannot be
            of_types[sizes] = this.numel, this.shape
        this.element_ty = element_ty
        this.numel, this.shape = of_types[sizes]

    # The plain one sets what is computed here.
    block_type.name = property(lambda this: f"<{this.shape}, {this.element_ty}>", lambda this, name: None)
    tensor.__init__, block_type.__init__ = tensor_init, block_init

    def undo():
        tensor.__init__, block_type.__init__ = plain_tensor, plain_block
        del block_type.name

    return undo
