"""Many fp32 vectors to int8 blocks of 32: the loop over vectors around ``int8_quantize.py``."""

from realizar_torch.cpu_kernels.int8_quantize import quantize_blocks
from realizar_torch.cpu_kernels.jit import jit

BLOCK = 32


@jit
def quantize_vectors(thread, n_threads, x, count, width, padded_width, q, scale, sums):
    """fp32 x [count, width] → int8 q [count, padded_width], fp32 scale and sums: blocks of 32, of 16.

    ``padded_width`` is a multiple of 32; what exceeds ``width`` counts as zero and is not read. Each vector
    is quantized by one thread.
    """
    blocks = padded_width // BLOCK
    for index in range(thread, count, n_threads):
        quantize_blocks(
            x + 4 * width * index,
            width,
            0,
            blocks,
            q + padded_width * index,
            scale + 4 * blocks * index,
            sums + 8 * blocks * index,
        )
