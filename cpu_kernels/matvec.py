"""Packed weights times one or a few vectors: tiles of rows handed out to threads by an atomic counter."""

from realizar_torch.cpu_kernels.int8_rows import rows_of_tile
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import fetch_add_i64, load_f32, store_f32
from realizar_torch.cpu_kernels.native import call_native
from realizar_torch.cpu_kernels.step_vectors import activate_row, multiply_row


@jit
def matvec_tiles(
    thread,
    n_threads,
    counter,
    kernel,
    weight,
    row_bytes,
    rows,
    width,
    count,
    x,
    x_stride,
    scale,
    scale_stride,
    sums,
    sums_stride,
    bias,
    out,
    out_stride,
):
    """``out[i] = weight · x[i] + bias`` for ``count`` vectors, by ``kernel`` (an address of row_kernels.py).

    ``counter`` is the address of a zero int64; strides are bytes between vectors; a ``bias`` of 0 is none.
    """
    tile = rows_of_tile(rows, row_bytes, n_threads)
    while True:
        first = fetch_add_i64(counter, tile)
        if first >= rows:
            return
        last = min(first + tile, rows)
        for i in range(count):
            target = out + out_stride * i
            vector = (x + x_stride * i, scale + scale_stride * i, sums + sums_stride * i)
            call_native(kernel, (weight, row_bytes, first, last, width, *vector, target))
            if bias:
                for row in range(first, last):
                    store_f32(target, load_f32(target, 4 * row) + load_f32(bias, 4 * row), 4 * row)


@jit
def gate_up_tiles(
    thread,
    n_threads,
    counter,
    gate_kernel,
    gate_weight,
    gate_row_bytes,
    up_kernel,
    up_weight,
    up_row_bytes,
    rows,
    width,
    x,
    scale,
    sums,
    activation,
    up,
    out,
):
    """``out = activation(gate_weight · x) * (up_weight · x)``, both fp32 [rows]; ``up`` is scratch [rows]."""
    tile = rows_of_tile(rows, gate_row_bytes, n_threads)
    while True:
        first = fetch_add_i64(counter, tile)
        if first >= rows:
            return
        last = min(first + tile, rows)
        call_native(gate_kernel, (gate_weight, gate_row_bytes, first, last, width, x, scale, sums, out))
        call_native(up_kernel, (up_weight, up_row_bytes, first, last, width, x, scale, sums, up))
        activate_row(activation, out + 4 * first, last - first)
        multiply_row(out + 4 * first, up + 4 * first, last - first)
