"""Raw memory of the CPU kernels: half and bfloat16 values, rounding, integers, a CPU without F16C."""

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.memory import (
    f32_to_half_bits,
    half_bits_to_f32,
    load_bf16,
    load_f16,
    load_f32,
    load_f64,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    load_u32,
    stack_alloc,
    store_bf16,
    store_f16,
    store_f32,
    store_f64,
    store_i8,
    store_i32,
    store_i64,
    store_u8,
    store_u16,
)


@jit
def _half_loads(source, count, hardware, steps):
    for i in range(count):
        store_f32(hardware, load_f16(source, 2 * i), 4 * i)
        store_f32(steps, half_bits_to_f32(load_u16(source, 2 * i)), 4 * i)


@jit
def _narrow_stores(source, count, hardware, steps, brain):
    for i in range(count):
        value = load_f32(source, 4 * i)
        store_f16(hardware, value, 2 * i)
        store_u16(steps, f32_to_half_bits(value), 2 * i)
        store_bf16(brain, value, 2 * i)


@jit
def _brain_loads(source, count, target):
    for i in range(count):
        store_f32(target, load_bf16(source, 2 * i), 4 * i)


@jit
def _integers(source, target):
    store_i64(target, load_u8(source))
    store_i64(target, load_i8(source), 8)
    store_i64(target, load_u16(source), 16)
    store_i64(target, load_u32(source), 24)
    store_i64(target, load_i32(source), 32)
    store_i64(target, load_i64(source), 40)
    store_f64(target, load_f64(source, 8), 48)
    # one byte off: no alignment is assumed
    store_i64(target, load_i32(source, 1), 56)


@jit
def _integer_stores(target):
    store_u8(target, 0x1FE, 0)
    store_i8(target, -2, 1)
    store_u16(target, 0x1FFFE, 3)
    store_i32(target, -2, 7)


@jit
def _scratch(target):
    first, second = stack_alloc(40, 64), stack_alloc(40, 64)
    for i in range(40):
        store_u8(first, i, i)
        store_u8(second, 100 + i, i)
    for i in range(40):
        store_u8(target, load_u8(first, i), i)
        store_u8(target, load_u8(second, i), 40 + i)
    store_i64(target, first % 64 + second % 64, 80)


def _same(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bits, where expected is not NaN; NaN elsewhere."""
    nan = np.isnan(expected)
    bits = f"u{expected.itemsize}"
    return bool(np.isnan(actual[nan]).all() and (actual.view(bits) == expected.view(bits))[~nan].all())


def _difficult_floats() -> np.ndarray:
    """Random bits, every half value, its neighbours and the midpoints between halves."""
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    middle = (finite[1:] + finite[:-1]) / 2
    largest = np.float32([65519.996, 65520, 65520.004, -65520, 3.4e38])
    return np.concatenate(
        [
            bits,
            halves,
            middle,
            np.nextafter(middle, np.float32(9)),
            np.nextafter(finite, np.float32(0)),
            largest,
        ]
    )


def test_every_half_loads_right_in_hardware_and_in_steps():
    halves = np.arange(65536, dtype=np.uint16)
    hardware, steps = np.empty((2, 65536), np.float32)
    _half_loads(halves.ctypes.data, 65536, hardware.ctypes.data, steps.ctypes.data)
    expected = halves.view(np.float16).astype(np.float32)
    assert _same(hardware, expected)
    assert _same(steps, expected)


def test_narrowing_rounds_to_nearest_even():
    values = _difficult_floats()
    hardware, steps, brain = np.empty((3, len(values)), np.uint16)
    addresses = (array.ctypes.data for array in (hardware, steps, brain))
    _narrow_stores(values.ctypes.data, len(values), *addresses)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    assert _same(hardware.view(np.float16), expected)
    assert _same(steps.view(np.float16), expected)
    expected = torch.from_numpy(values).bfloat16()
    ours = torch.from_numpy(brain.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.view(torch.int16)[~ours.isnan()], expected.view(torch.int16)[~ours.isnan()])
    wide = np.empty(len(values), np.float32)
    _brain_loads(brain.ctypes.data, len(values), wide.ctypes.data)
    assert _same(wide, ours.float().numpy())


def test_integers_keep_their_signs_and_widths():
    source = np.frombuffer(
        bytes([0xFE, 0xFF, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8]) + np.float64(2.5).tobytes(), "u1"
    )
    target = np.zeros(8, np.int64)
    _integers(source.ctypes.data, target.ctypes.data)
    word = source[:8].tobytes()
    integer = int.from_bytes
    assert target[:6].tolist() == [
        0xFE,
        -2,
        0xFFFE,
        integer(word[:4], "little"),
        integer(word[:4], "little", signed=True),
        integer(word, "little", signed=True),
    ]
    assert target[6:7].view(np.float64)[0] == 2.5
    assert target[7] == integer(word[1:5], "little", signed=True)
    stored = np.full(12, 0x55, np.uint8)
    _integer_stores(stored.ctypes.data)
    assert stored.tolist() == [0xFE, 0xFE, 0x55, 0xFE, 0xFF, 0x55, 0x55, 0xFE, 0xFF, 0xFF, 0xFF, 0x55]


def test_scratch_is_aligned_and_separate():
    target = np.zeros(88, np.uint8)
    _scratch(target.ctypes.data)
    assert target[:80].tolist() == [*range(40), *range(100, 140)]
    assert target[80:].view(np.int64)[0] == 0


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names an x86 CPU")
def test_a_cpu_without_avx_and_f16c_computes_the_same(tmp_path):
    """Numba compiles for the oldest x86-64; weights decode to the same bits, products within tolerance."""
    program = """
    import torch
    from cases import PACKED, assert_within, float_tolerance, random_activations, random_blocks
    from realizar_torch import reference
    from realizar_torch.cpu_kernels import launch, memory

    assert not memory.HARDWARE_HALF
    for fmt in PACKED:
        weight, x = random_blocks(fmt, 9, 300), random_activations(5, 300)
        decoded = reference.dequantize(weight, fmt, 300)
        assert torch.equal(launch.dequantize(weight, fmt, 300), decoded), fmt
        y = launch.matmul(x, weight, fmt, 300)
        assert_within(y, x.double() @ decoded.double().T, float_tolerance(x, decoded))
        assert torch.equal(launch.matmul(x[1:2], weight, fmt, 300), y[1:2]), fmt
    """
    oldest = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "", "HOME": str(tmp_path)}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | oldest | {"PYTHONPATH": path},
        check=True,
        timeout=300,
    )
