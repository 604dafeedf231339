"""A GPU step's products by the modules, for tests of all else: interpreted, products take the longest."""

import torch
from torch.nn import functional

from realizar_torch.generation.gpu_linears import GpuLinears


class ModuleLinears(GpuLinears):
    """In place of ``gpu_step.GpuLinears``, for float activations."""

    def linear(self, linear, x, out, residual=None):
        return out.copy_(linear(x) if residual is None else linear(x) + residual)

    def qkv(self, attention, x, out):
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        out.copy_(torch.cat([part(x) for part in parts], 1))

    def mlp(self, mlp, x):
        gate = mlp.gate_proj(x)
        silu = mlp.activation == "silu"
        return (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * mlp.up_proj(x)
