"""Kernels compiled for chips that need not be here, and the checks on their binaries."""
