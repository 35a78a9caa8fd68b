"""Triton kernels for CUDA devices, and which of them are in use."""
