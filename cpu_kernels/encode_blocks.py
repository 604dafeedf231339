"""Bit fields of 16 blocks at a time: byte columns of levels into the byte columns of a block.

``out`` is the address of a field's byte columns; ``realizar_torch/encode/blocks.py`` is the definition.
"""

from realizar_torch.cpu_kernels.encode_lanes import BYTE_COLUMN
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.simd import load_u8x16, store


@jit(device=True)
def pack_bits(levels, count, lanes, width, shift, out):
    """Bits ``shift`` … ``shift + width - 1`` of ``count`` levels into bytes.

    A run of ``lanes`` bytes takes 8/width consecutive runs of ``lanes`` levels, lowest bits first.
    """
    places, mask = 8 // width, (1 << width) - 1
    for run in range(count // (lanes * places)):
        for lane in range(lanes):
            first = levels + BYTE_COLUMN * (run * places * lanes + lane)
            packed = (load_u8x16(first) >> shift) & mask
            for place in range(1, places):
                level = load_u8x16(first, BYTE_COLUMN * lanes * place)
                packed = packed | (((level >> shift) & mask) << (width * place))
            store(out, packed, BYTE_COLUMN * (run * lanes + lane))


@jit(device=True)
def k4_fields(levels):
    """Eight bytes become the six bits of each that Q4_K gives back once ggml has stored them."""
    for j in range(4):
        low, high = load_u8x16(levels, BYTE_COLUMN * j), load_u8x16(levels, BYTE_COLUMN * (j + 4))
        store(levels, low & 63, BYTE_COLUMN * j)
        store(levels, (high & 63) | ((low >> 6) << 4), BYTE_COLUMN * (j + 4))


@jit(device=True)
def pack_k4_scales(ls, lm, out):
    """Eight six-bit scales and minima into 12 bytes, as ``reference._k4_scales`` reads them."""
    for j in range(4):
        scale, high_scale = load_u8x16(ls, BYTE_COLUMN * j), load_u8x16(ls, BYTE_COLUMN * (j + 4))
        below, high_below = load_u8x16(lm, BYTE_COLUMN * j), load_u8x16(lm, BYTE_COLUMN * (j + 4))
        store(out, scale | ((high_scale >> 4) << 6), BYTE_COLUMN * j)
        store(out, below | ((high_below >> 4) << 6), BYTE_COLUMN * (j + 4))
        store(out, (high_scale & 15) | ((high_below & 15) << 4), BYTE_COLUMN * (j + 8))
