"""Program -> Executable for NVIDIA and AMD: torch for memory, streams, BLAS, graphs; kernels in Triton, one source."""
