"""Kernels for a GPU, written in Triton; imported only where Triton is installed."""
