"""Decoded rows: fp32 weights of a whole row, one device function per packed format."""

from collections.abc import Mapping
from types import MappingProxyType

from realizar_torch.cpu_kernels.block_decoders import DECODERS, SUB_BLOCK
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import load_f32, stack_alloc, store_f32
from realizar_torch.cpu_kernels.simd import i8x16_to_f32x16, load_u8x16, store

# Bytes of the longest decoded block: int8 quants, fp32 scales (as many minima), fp32 weights.
Q_BYTES, SCALE_BYTES, WEIGHT_BYTES = 256, 64, 1024


@jit(device=True)
def sixteen_weights(q, scale, minimum, sub):
    """Sub-block ``sub`` of a decoded block in 16 fp32 lanes: ``scale * q - minimum``, rounded twice."""
    product = i8x16_to_f32x16(load_u8x16(q, SUB_BLOCK * sub)) * load_f32(scale, 4 * sub)
    return product - load_f32(minimum, 4 * sub)


def _row(fmt, decode):
    """The row decoder of one format."""
    size, block_bytes = fmt.block_size, fmt.block_bytes
    sub_blocks = size // SUB_BLOCK

    @jit(device=True)
    def row_of_format(row, count, target):
        """The first ``count`` weights of the row at ``row``, as fp32 at ``target``, and nothing beyond."""
        q, scale, minimum = (
            stack_alloc(Q_BYTES, 64),
            stack_alloc(SCALE_BYTES, 64),
            stack_alloc(SCALE_BYTES, 64),
        )
        last = stack_alloc(WEIGHT_BYTES, 64)
        for block in range((count + size - 1) // size):
            decode(row + block_bytes * block, q, scale, minimum)
            whole = size * (block + 1) <= count
            weights = target + 4 * size * block if whole else last
            for sub in range(sub_blocks):
                store(weights, sixteen_weights(q, scale, minimum, sub), 4 * SUB_BLOCK * sub)
        for index in range(count // size * size, count):
            store_f32(target, load_f32(last, 4 * (index % size)), 4 * index)

    return row_of_format


ROW_DECODERS: Mapping[str, object] = MappingProxyType(
    {fmt.name: _row(fmt, decode) for fmt, decode in DECODERS}
)
