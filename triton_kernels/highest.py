"""The token of the highest logit of every row, in one launch."""

import torch
import triton
import triton.language as tl

from realizar_torch.errors import FormatError
from realizar_torch.triton_kernels.launch import on_device, same_device

_CHUNK = 2048
# the smallest key: no logit at all
_NOTHING = -(2**63)


@triton.jit
def ordered(value):
    """An int32 that orders like the fp32 ``value``; NaN is above infinity."""
    # -0.0 and 0.0 are equal
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(value == value, order, 0x7FFFFFFF)


@triton.jit
def unordered(order):
    """The fp32 value of an order."""
    return tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def ranked(value, index):
    """The logit, as an integer that orders like it, above 2^32 - 1 - index: a maximum of keys, int64, is the
    lowest index of the highest logit, in any order of programs.
    """
    return (ordered(value).to(tl.int64) << 32) | (0xFFFFFFFF - index.to(tl.int64))


@triton.jit
def token_of(best):
    """The index in a key of ``ranked``; -1 where the logit is NaN or infinite."""
    finite = ((best >> 32) < 0x7F800000) & ((best >> 32) > -0x7F800001)
    return tl.where(finite, 0xFFFFFFFF - (best & 0xFFFFFFFF), -1)


@triton.jit
def _highest_kernel(logits, tokens, keys, arrived, vocabulary, CHUNK: tl.constexpr, NOTHING: tl.constexpr):
    """Program (b, c): the highest of logits[b, c * CHUNK …]; the one that arrives last writes tokens[b]."""
    row = tl.program_id(0)
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + index, mask=index < vocabulary, other=0)
    key = tl.max(tl.where(index < vocabulary, ranked(value, index), NOTHING), 0)
    tl.atomic_max(keys + row, key, sem="acq_rel")
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        best = tl.atomic_xchg(keys + row, NOTHING, sem="acq_rel")
        tl.store(arrived + row, 0)
        tl.store(tokens + row, token_of(best))


def highest_scratch(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and arrival counters of ``take_highest``, which leaves them as they are made here."""
    keys = torch.full((batch,), _NOTHING, dtype=torch.int64, device=device)
    return keys, torch.zeros(batch, dtype=torch.int32, device=device)


def take_highest(
    logits: torch.Tensor, tokens: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """tokens[b] = the first index of the highest of logits[b]; -1 where that is NaN or infinite.

    logits fp32 ``[batch, vocabulary]``, tokens int64 ``[batch]``, scratch of ``highest_scratch(batch)``.
    """
    batch, vocabulary = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise FormatError(f"logits are {logits.dtype} {tuple(logits.shape)}; expected contiguous float32")
    if tokens.shape != (batch,) or tokens.dtype != torch.int64 or scratch[0].shape != (batch,):
        raise FormatError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}; expected int64 ({batch},)")
    with on_device(same_device(logits, tokens, *scratch)):
        _highest_kernel[(batch, triton.cdiv(vocabulary, _CHUNK))](
            logits, tokens, *scratch, vocabulary, CHUNK=_CHUNK, NOTHING=_NOTHING, num_warps=4
        )
