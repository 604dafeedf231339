"""GGUF block-quantized weights, kept packed in PyTorch: Triton kernels on NVIDIA GPUs, Numba kernels on CPUs."""

__version__ = "0.1.0"
