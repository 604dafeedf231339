"""Triton kernels for NVIDIA GPUs."""

if __name__ != "realizar_torch.triton_kernels":
    raise ImportError("import realizar_torch.triton_kernels, not triton_kernels")
