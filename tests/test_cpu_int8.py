"""The int8 CPU kernels against the oracle: every format, every target this CPU can run, both products."""

import ctypes
import functools
import itertools
import mmap
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import (
    PACKED,
    PROBES,
    assert_within,
    int8_kernel_tolerance,
    probe_vector,
    random_activations,
    random_blocks,
)

from realizar_torch import reference
from realizar_torch.formats import FORMATS, FORMATS_BY_GGML_TYPE

pytest.importorskip("numba")

import numba
from llvmlite import binding, ir
from numba.extending import intrinsic

from realizar_torch.cpu_kernels.activation_panel import COLUMNS, copy_into_panel, panel_places
from realizar_torch.cpu_kernels.int8_matmul import kind_of_sums, matmul_tile_of
from realizar_torch.cpu_kernels.int8_quantize import quantize_blocks
from realizar_torch.cpu_kernels.jit import jit, target_features
from realizar_torch.cpu_kernels.memory import load_u16, store_f32
from realizar_torch.cpu_kernels.row_kernels import int8_rows_of
from realizar_torch.cpu_kernels.simd_unpack import half_bits_to_float
from realizar_torch.cpu_kernels.targets import GENERIC, TARGETS, best_target

RUNNABLE = [target for target in TARGETS if target.features <= target_features()]
by_target = pytest.mark.parametrize("target", RUNNABLE, ids=lambda target: target.name)
by_format = pytest.mark.parametrize("fmt", PACKED)


@functools.cache
def _rows(target, fmt: str) -> Callable[..., None]:
    """What ``row_kernels.int8_rows`` compiles, for any target."""
    rows = int8_rows_of(fmt)

    @jit
    def run(weight, row_bytes, first, last, width, q, scale, sums, out):
        rows(target, weight, row_bytes, first, last, width, q, scale, sums, out)

    return run


def _matvec(target) -> Callable[..., None]:
    def run(ggml_type, weight, row_bytes, first, last, n_blocks, q, scale, sums, out):
        spec = FORMATS_BY_GGML_TYPE[ggml_type]
        width = n_blocks * spec.block_size
        _rows(target, spec.name)(weight, row_bytes, first, last, width, q, scale, sums, out)

    return run


@functools.cache
def _tile(target, fmt: str) -> Callable[..., None]:
    """A tile of rows, and the activation panel that it reads, as the launchers make it."""
    tile, kinds = matmul_tile_of(fmt), 1 << kind_of_sums(fmt)

    @jit
    def run(weight, row_bytes, rows, width, used, columns, x_q, x_scale, q, scale, sums, out):
        for column in range(used):
            x = (x_q + width * column, x_scale + width // 8 * column)
            copy_into_panel(*x, width, column, columns, kinds, q, scale, sums)
        tile(target, weight, row_bytes, rows, width, used, columns, q, scale, sums, out)

    return run


@pytest.fixture(scope="module")
def matvec_of() -> dict:
    return {target.name: _matvec(target) for target in RUNNABLE}


@pytest.fixture(scope="module")
def matmul_of() -> dict:
    return {target.name: functools.partial(_tile, target) for target in RUNNABLE}


def _matvec_product(run, fmt: str, weight: torch.Tensor, qx, cuts=()) -> torch.Tensor:
    spec, rows = FORMATS[fmt], len(weight)
    out = torch.empty(len(qx.q), rows)
    n_blocks, row_bytes = weight.shape[1] // spec.block_bytes, weight.shape[1]
    for column in range(len(qx.q)):
        addresses = [part[column].data_ptr() for part in (qx.q, qx.scale, qx.sums, out)]
        for first, last in zip((0, *cuts), (*cuts, rows), strict=True):
            run(spec.ggml_type, weight.data_ptr(), row_bytes, first, last, n_blocks, *addresses)
    return out


def _matmul_product(tile_of, fmt: str, weight: torch.Tensor, qx, cuts=()) -> torch.Tensor:
    """The product, tile by tile; panels are filled with garbage first."""
    rows, columns, width = len(weight), len(qx.q), qx.q.shape[1]
    padded = -(-columns // COLUMNS) * COLUMNS
    scales, sums, nbytes = panel_places(width, padded, bf16=False)
    panel = torch.randint(256, (nbytes,), dtype=torch.uint8)
    panel_at = panel.data_ptr()
    product, edges = [], sorted({*range(0, rows, 32), *cuts, rows})
    for first, last in itertools.pairwise(edges):
        out = torch.full((padded, 32), torch.nan)
        shape = (weight.shape[1], last - first, width, columns, padded)
        x = (qx.q.data_ptr(), qx.scale.data_ptr(), panel_at, panel_at + scales, panel_at + sums)
        tile_of(fmt)(weight[first:].data_ptr(), *shape, *x, out.data_ptr())
        product.append(out[:columns, : last - first])
    return torch.cat(product, dim=1).contiguous()


def _case(fmt: str, rows: int, blocks: int, columns: int):
    in_features = blocks * FORMATS[fmt].block_size
    weight = random_blocks(fmt, rows, in_features)
    qx = reference.quantize_activations(random_activations(columns, in_features), fmt)
    decoded = reference.dequantize(weight, fmt, dtype=torch.float64)
    quantized = qx.q.double() * qx.scale.double().repeat_interleave(32, -1)
    expected = reference.linear_int8(qx, weight, fmt, in_features)
    return weight, qx, expected, int8_kernel_tolerance(quantized, decoded)


# whole groups of four blocks, every remainder, one block, and the width of SmolLM2 (18 blocks of 32)
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 18])
@by_format
@by_target
def test_matvec_equals_the_oracle(matvec_of, target, fmt: str, blocks: int) -> None:
    weight, qx, expected, tolerance = _case(fmt, 5, blocks, 1)
    assert_within(_matvec_product(matvec_of[target.name], fmt, weight, qx), expected, tolerance)


# tails of the row tile (16 or 32), of the column tile (2 to 8) and of the panel (512 weights)
@pytest.mark.parametrize(
    ("rows", "blocks", "columns"), [(64, 2, 4), (37, 3, 5), (17, 5, 1), (7, 1, 2), (33, 17, 3), (16, 18, 19)]
)
@by_format
@by_target
def test_matmul_equals_the_oracle(matmul_of, target, fmt: str, rows: int, blocks: int, columns: int) -> None:
    weight, qx, expected, tolerance = _case(fmt, rows, blocks, columns)
    assert_within(_matmul_product(matmul_of[target.name], fmt, weight, qx), expected, tolerance)


@by_format
@by_target
def test_products_do_not_depend_on_how_rows_are_shared(matvec_of, matmul_of, target, fmt: str) -> None:
    weight, qx, *_ = _case(fmt, 70, 3, 6)
    for run, product in ((matvec_of, _matvec_product), (matmul_of, _matmul_product)):
        whole = product(run[target.name], fmt, weight, qx)
        shared = product(run[target.name], fmt, weight, qx, cuts=(1, 38, 64))
        assert torch.equal(whole, shared)


@by_format
@by_target
def test_probe_products_are_exact(matvec_of, matmul_of, target, fmt: str) -> None:
    """The probe vector is its own quantization with scale 1, and every partial sum of a probe is exact."""
    probe, size = PROBES[fmt], FORMATS[fmt].block_size
    q = probe_vector(size).to(torch.int8).reshape(1, size)
    sums = q.reshape(1, -1, 16).sum(-1).float()
    qx = reference.QuantizedActivations(q, torch.ones(1, size // 32), sums, size)
    for run, product in ((matvec_of, _matvec_product), (matmul_of, _matmul_product)):
        assert product(run[target.name], fmt, probe.rows(3), qx).tolist() == [[probe.dot] * 3]


@pytest.mark.parametrize("fmt", ["Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K"])
@by_target
def test_offsets_cancel_exactly(matvec_of, matmul_of, target, fmt: str) -> None:
    """Rows whose weights are all zero give zero, whatever the activations: offsets never reach fp32."""
    zero = {"Q4_0": 0x88, "Q5_0": 0x00, "Q8_0": 0x00, "Q3_K": 0x00, "Q6_K": 0x00}[fmt]
    spec, blocks = FORMATS[fmt], 6
    weight = torch.full((2, blocks, spec.block_bytes), zero, dtype=torch.uint8)
    fields = {"Q5_0": ("qh", 255), "Q3_K": ("hmask", 255), "Q6_K": ("qh", 0xAA)}
    if fmt in fields:
        name, value = fields[fmt]
        start = spec.offset(name)
        weight[..., start : start + next(f.nbytes for f in spec.fields if f.name == name)] = value
    if fmt != "Q8_0" and "scales" in [field.name for field in spec.fields]:
        start = spec.offset("scales")
        weight[..., start : start + 12] = torch.randint(1, 100, (12,), dtype=torch.uint8)
    d = torch.tensor([0.7123], dtype=torch.float16).view(torch.uint8)
    weight[..., spec.offset("d") : spec.offset("d") + 2] = d
    weight = weight.flatten(1)
    assert not reference.dequantize(weight, fmt).any()
    qx = reference.quantize_activations(random_activations(3, blocks * spec.block_size), fmt)
    for run, product in ((matvec_of, _matvec_product), (matmul_of, _matmul_product)):
        assert not product(run[target.name], fmt, weight, qx).any()


class _GuardedPage:
    """Memory that ends where an unreadable page begins: reading one byte too many kills the process."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 33 * mmap.PAGESIZE)
        self.end = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + 32 * mmap.PAGESIZE
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert mprotect(self.end, mmap.PAGESIZE, 0) == 0

    def place(self, tensor: torch.Tensor) -> int:
        """Copy a tensor so that its last byte is the last readable one; its address."""
        nbytes = tensor.numel() * tensor.element_size()
        ctypes.memmove(self.end - nbytes, tensor.contiguous().data_ptr(), nbytes)
        return self.end - nbytes


@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="needs POSIX memory protection")
@pytest.mark.parametrize("blocks", [1, 4, 7])
@by_format
@by_target
def test_nothing_past_the_end_is_read(matvec_of, matmul_of, target, fmt: str, blocks: int) -> None:
    weight, qx, expected, tolerance = _case(fmt, 3, blocks, 3)
    spec = FORMATS[fmt]
    scales, sums_at, nbytes = panel_places(qx.q.shape[1], COLUMNS, bf16=False)
    pages = [_GuardedPage() for _ in range(7)]
    parts = (weight, qx.q, qx.scale, qx.sums, torch.empty(3, 3))
    w, q, scale, sums, out = (page.place(part) for page, part in zip(pages, parts, strict=False))
    row_bytes, width = weight.shape[1], qx.q.shape[1]
    result = torch.empty(3, 3)
    for c in range(3):
        at = c * width
        vector = (q + at, scale + at // 8, sums + at // 4)
        matvec_of[target.name](spec.ggml_type, w, row_bytes, 0, 3, blocks, *vector, out + 12 * c)
    ctypes.memmove(result.data_ptr(), out, 36)
    assert_within(result, expected, tolerance)

    panel = pages[5].place(torch.zeros(nbytes, dtype=torch.uint8))
    tile = pages[6].place(torch.zeros(COLUMNS, 32))
    shape = (row_bytes, 3, width, 3, COLUMNS)
    places = (panel, panel + scales, panel + sums_at, tile)
    matmul_of[target.name](fmt)(w, *shape, q, scale, *places)
    product = torch.empty(COLUMNS, 32)
    ctypes.memmove(product.data_ptr(), tile, product.nbytes)
    assert_within(product[:3, :3].contiguous(), expected, tolerance)


@jit
def _quantize(x, count, first, last, q, scale, sums):
    quantize_blocks(x, count, first, last, q, scale, sums)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 300, 576, 1280])
@pytest.mark.parametrize("kind", ["normal", "tiny", "subnormal", "huge", "sparse", "halves", "inf", "nan"])
def test_quantizer_is_bit_equal_to_the_oracle(columns: int, kind: str) -> None:
    x = random_activations(columns)
    steps = torch.arange(columns)
    x = {
        "normal": x,
        "tiny": x * 1e-37,
        "subnormal": (steps % 301 - 150) * 2.0**-149,
        "huge": x * 1e36,
        "sparse": x * (steps // 40 % 2),
        "halves": (steps % 255 - 127) / 2,
        "inf": torch.where(steps == columns // 2, torch.inf, x),
        "nan": torch.where(steps == columns - 1, torch.nan, x),
    }[kind].float()
    expected = reference.quantize_activations(x, "Q4_K")
    parts = [torch.empty_like(part) for part in (expected.q, expected.scale, expected.sums)]
    addresses = [part.data_ptr() for part in parts]
    last = len(expected.scale)
    for first, end in ((0, last // 3), (last // 3, last)):
        _quantize(x.data_ptr(), columns, first, end, *addresses)
    for part, wanted in zip(parts, (expected.q, expected.scale, expected.sums), strict=True):
        assert torch.equal(part.isnan(), wanted.isnan())
        assert torch.equal(part.nan_to_num(3), wanted.nan_to_num(3))


def test_half_precision_without_hardware_is_exact() -> None:
    @intrinsic
    def by_steps(typing_context, bits):
        def generate(context, builder, signature, arguments):
            lane = ir.Constant(ir.VectorType(ir.IntType(16), 4), ir.Undefined)
            half = builder.trunc(arguments[0], ir.IntType(16))
            lane = builder.insert_element(lane, half, ir.IntType(32)(2))
            return builder.extract_element(half_bits_to_float(builder, lane), ir.IntType(32)(2))

        return numba.float32(numba.int64), generate

    @jit
    def convert(source, target, count):
        for i in range(count):
            store_f32(target, by_steps(load_u16(source, 2 * i)), 4 * i)

    bits = np.arange(65536, dtype=np.uint16)
    values = np.empty(65536, np.float32)
    convert(bits.ctypes.data, values.ctypes.data, 65536)
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(values), np.signbit(expected))


def test_the_host_target_is_the_first_that_runs() -> None:
    rows, target = int8_rows_of("Q4_K"), best_target()

    @jit
    def run(weight, row_bytes, width, q, scale, sums, out):
        rows(target, weight, row_bytes, 0, 1, width, q, scale, sums, out)

    run.compile((numba.int64,) * 7)
    assert best_target() is RUNNABLE[0]
    instruction = {"vpdpbusd": "vpdpbusd", "pmaddubsw": "vpmaddubsw"}.get(best_target().dot, "mul")
    assert instruction in run.inspect_asm(run.signatures[0])


def test_generic_kernels_compile_for_arm() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    kernels = [(_rows(GENERIC, fmt), 9) for fmt in PACKED] + [(_tile(GENERIC, fmt), 12) for fmt in PACKED]
    for run, arity in kernels:
        run.compile((numba.int64,) * arity)
        module = run.inspect_llvm(run.signatures[0])
        module = re.sub(r'target triple = ".*"', 'target triple = "aarch64-unknown-linux-gnu"', module)
        module = re.sub(r'target datalayout = ".*"', "", module)
        module = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", module)
        machine = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=2)
        assert "fmla" in machine.emit_assembly(binding.parse_assembly(module))
