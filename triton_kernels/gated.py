"""act(gate) * up of many rows: the elementwise middle of a gated MLP, in one pass over its product."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.gate_up import ACTIVATIONS, activate
from realizar_torch.triton_kernels.launch import FLOAT_DTYPES, on_device, same_device
from realizar_torch.triton_kernels.primitives import cast

_COLUMNS = 1024


@triton.jit
def _gated_kernel(pair, out, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Row program_id(0): out[c] = act(pair[c]) * pair[width + c] in fp32, for COLUMNS columns c."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(pair + row * (2 * width) + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(pair + row * (2 * width) + width + column, mask=inside, other=0).to(tl.float32)
    value = activate(gate, ACTIVATION) * up
    tl.store(out + row * width + column, cast(value, out.dtype.element_ty), mask=inside)


def gated(pair: torch.Tensor, out: torch.Tensor, *, activation: str) -> torch.Tensor:
    """out ``[M, n]`` = act(pair[:, :n]) * pair[:, n:], both contiguous floats; "silu" or "gelu_tanh"."""
    rows, width = out.shape
    if activation not in ACTIVATIONS:
        raise FormatError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    right = pair.shape == (rows, 2 * width) and pair.is_contiguous() and out.is_contiguous()
    if not right or pair.dtype not in FLOAT_DTYPES or out.dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"pair is {pair.dtype} {tuple(pair.shape)}, out {out.dtype} {tuple(out.shape)}; expected "
            f"contiguous floats ({rows}, {2 * width}) and ({rows}, {width})"
        )
    with on_device(same_device(pair, out)):
        _gated_kernel[(rows, triton.cdiv(width, _COLUMNS))](
            pair, out, width, ACTIVATION=activation, COLUMNS=_COLUMNS, num_warps=4, enable_fp_fusion=True
        )
    return out
