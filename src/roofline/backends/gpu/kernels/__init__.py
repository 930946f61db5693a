"""The Triton kernels: a file holds a kernel, its launcher on torch tensors, its cost, and what of it is compiled ahead.

The only modules that import torch and triton at the top; nothing imports them but the gpu backend when it runs.
"""
