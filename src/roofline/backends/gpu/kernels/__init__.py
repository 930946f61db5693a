"""The Triton kernels: a file holds a kernel, its launcher on torch tensors, its cost, and what of it is compiled ahead.

An integer that is no multiple of 16 in every model is in `do_not_specialize`: Triton compiles anew for 1, for multiples
of 16 and for others, in the middle of serving where the number is one of rows or segments.

The only modules that import torch and triton at the top; nothing imports them but the gpu backend when it runs.
"""
