"""Numba kernels for CPUs: addresses and sizes in, results written to the caller's memory."""

if __name__ != "realizar_torch.cpu_kernels":
    raise ImportError("import realizar_torch.cpu_kernels, not cpu_kernels")
