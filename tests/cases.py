"""The cases that tests and bench share: formats, odd shapes, random and probe blocks, tolerances."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from realizar_torch.formats import FORMATS, get_packed_format, supported_formats

PACKED = supported_formats()
# tails of every tile size in use, and one more than 256
ROWS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 96, 127, 129, 257)
# whole blocks of every format, rows that must be padded, and the widths of small real models (576, 640, 896)
COLUMNS = (1, 31, 32, 33, 255, 256, 257, 300, 512, 576, 640, 896, 1280)
BATCHES = (0, 1, 2, 7, 16, 33)
# (M, N, K): every batch, tail and padding once, few enough to run for every format
MATMUL_SHAPES = (
    (0, 7, 256),
    (1, 1, 1),
    (1, 2, 300),
    (1, 65, 576),
    (1, 129, 1280),
    (2, 3, 31),
    (2, 63, 640),
    (7, 17, 257),
    (16, 33, 896),
    (33, 15, 512),
)

_RELATIVE_ERROR = {
    torch.float64: 2**-50,
    torch.float32: 4e-6,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
}


def random_blocks(fmt: str, rows: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Random bytes ``uint8 [rows, row_bytes]`` whose fp16 fields are finite: ± 2^-9 … 2^-5.

    Every other byte is uniform, so that scales, minima, high bits and signs all differ between sub-blocks.
    """
    spec = get_packed_format(fmt)
    rng = np.random.default_rng([seed, rows, in_features, spec.ggml_type])
    blocks = rng.integers(0, 256, (rows * spec.blocks(in_features), spec.block_bytes), dtype=np.uint8)
    for field in spec.fields:
        if field.kind == "f16":
            size = (len(blocks), field.count)
            values = np.exp2(rng.uniform(-9, -5, size)) * rng.choice([-1.0, 1.0], size)
            start = spec.offset(field.name)
            blocks[:, start : start + field.nbytes] = values.astype(np.float16).view(np.uint8)
    return torch.from_numpy(blocks.reshape(rows, spec.row_bytes(in_features)))


def random_activations(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values with one outlier channel (26 times larger), as real activations have."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if x.numel():
        x[..., shape[-1] // 3] *= 26
    return x.to(dtype)


def float_tolerance(x: torch.Tensor, decoded: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Largest error of a float path against float64: ``c * sum|w x|`` per output, ``c`` by output dtype.

    ``x [..., K]``, ``decoded [N, K]`` → float64 ``[..., N]``. For fp32, c = 4e-6 is about sqrt(K) roundings
    of the partial sums; for fp16 and bf16, one rounding of the output (2^-11, 2^-8) and a factor 2.
    """
    return _RELATIVE_ERROR[dtype or x.dtype] * (x.double().abs() @ decoded.double().abs().T)


def int8_kernel_tolerance(quantized: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Largest error of an int8 kernel against the float64 product of its own inputs: ``1e-5 * sum|w xq|``."""
    return 1e-5 * (quantized.double().abs() @ decoded.double().abs().T)


def int8_tolerance(x: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Largest error of int8 activations against exact ones: half a step of each value's block, 5 % to spare.

    ``1.05 * sum|w| * amax / 254`` with ``amax`` the largest |x| of the block of 32.
    """
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.double(), (0, -columns % 32))
    amax = padded.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)[..., :columns]
    return 1.05 / 254 * (amax @ decoded.double().abs().T)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> None:
    """Every element within its own tolerance; NaN on one side only fails."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs()
    wrong = ~(error <= tolerance)
    if wrong.any():
        ratio = torch.where(wrong, error / tolerance, 0).nan_to_num(torch.inf)
        where = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements off; worst at {where}: {actual[where].item()}, "
            f"expected {expected[where].item()} ± {tolerance[where].item()}"
        )


@dataclass(frozen=True)
class Probe:
    """A block that catches wrong decoders, and what the right decoding gives (ggml and gguf agree).

    ``dot`` is the product with ``probe_vector``, exact in fp32 in any order of summation; ``total`` the sum.
    """

    block: bytes
    dot: float
    total: float
    samples: Mapping[int, float]
    sha1: str

    def rows(self, count: int = 1) -> torch.Tensor:
        """``count`` equal rows of this one block, uint8 [count, block_bytes]."""
        return torch.frombuffer(bytearray(self.block), dtype=torch.uint8).repeat(count, 1)


def probe_vector(length: int) -> torch.Tensor:
    """``x[k] = (13 k mod 17) - 8``: small integers, exact in fp16 and bf16."""
    return ((13 * torch.arange(length)) % 17 - 8).float()


def _f16(value: float) -> bytes:
    return np.float16(value).tobytes()


def _low(count: int) -> bytes:
    return bytes((37 * i + 11) & 255 for i in range(count))


def _high(count: int) -> bytes:
    return bytes((29 * i + 7) & 255 for i in range(count))


def _signed(values: list[int]) -> bytes:
    return np.array(values, np.int8).tobytes()


_K4_SCALES = bytes.fromhex("c19263340556a7f84f7ca9d6")
_Q5_HIGH = (0xA5C30F17).to_bytes(4, "little")
_Q6_SCALES = [-128, 127, -1, 1, -64, 33, 2, -7, 100, -100, 5, -50, 77, -3, 64, -127]
_Q8_VALUES = [-128, 127, -1, 1] + [(23 * j) % 256 - 128 for j in range(28)]
_Q2_SCALES = bytes(((5 * i + 3) & 15) | (((7 * i + 1) & 15) << 4) for i in range(16))
_Q3_SCALES = bytes((53 * i + 19) & 255 for i in range(12))

PROBES: Mapping[str, Probe] = MappingProxyType(
    {
        "Q4_0": Probe(_f16(-0.5) + _low(16), 67.0, 15.5, {0: -1.5, 1: 4, 16: 4, 31: 2.5}, "d6a1baa4ac69"),
        "Q4_1": Probe(
            _f16(0.5) + _f16(-3) + _low(16), -63.0, 16.5, {0: 2.5, 1: -3, 16: -3, 31: -1.5}, "6f72786d5246"
        ),
        "Q5_0": Probe(
            _f16(0.5) + _Q5_HIGH + _low(16), -131.0, -15.5, {0: 5.5, 1: 0, 16: 0, 31: 1.5}, "b277c6b72cf2"
        ),
        "Q5_1": Probe(
            _f16(0.5) + _f16(-3) + _Q5_HIGH + _low(16),
            -111.0,
            144.5,
            {0: 10.5, 1: 5, 16: 5, 31: 6.5},
            "72184445687a",
        ),
        "Q8_0": Probe(
            _f16(0.5) + _signed(_Q8_VALUES),
            1790.5,
            -133.5,
            {0: -64, 1: 63.5, 16: -54, 31: -9.5},
            "e54c25797428",
        ),
        "Q2_K": Probe(
            _Q2_SCALES + _low(64) + _f16(1) + _f16(0.5),
            -81.0,
            1948.0,
            {
                0: 8.5,
                1: -0.5,
                32: 18.5,
                64: -6.5,
                96: -5.5,
                128: 28.5,
                160: 6.5,
                192: 27.5,
                224: 16.5,
                255: -5,
            },
            "1991ee435141",
        ),
        "Q3_K": Probe(
            _high(32) + _low(64) + _Q3_SCALES + _f16(0.25),
            -1783.75,
            9.0,
            {0: 14.25, 1: -19, 32: -1.5, 64: 0, 96: 15, 128: -4.25, 160: -3.5, 192: -7, 224: 13.5, 255: -0.0},
            "26e0a390cdb9",
        ),
        "Q4_K": Probe(
            _f16(1) + _f16(0.5) + _K4_SCALES + _low(128),
            -17954.0,
            54608.0,
            {
                0: 8.5,
                1: -2.5,
                32: -11,
                64: 365.5,
                96: 492,
                128: 691,
                160: 164.5,
                192: 254,
                224: 53.5,
                255: 5.5,
            },
            "fc247fdbef95",
        ),
        "Q5_K": Probe(
            _f16(1) + _f16(0.5) + _K4_SCALES + _high(32) + _low(128),
            -2914.0,
            115872.0,
            {
                0: 24.5,
                1: -2.5,
                32: 277,
                64: 925.5,
                96: 492,
                128: 691,
                160: 164.5,
                192: 254,
                224: 53.5,
                255: 101.5,
            },
            "6f797ffefb65",
        ),
        "Q6_K": Probe(
            _low(128) + _high(64) + _signed(_Q6_SCALES) + _f16(0.125),
            28067.75,
            631.875,
            {
                0: -432,
                1: 512,
                32: 0.625,
                64: 256,
                96: -5.5,
                128: 337.5,
                160: -3.125,
                192: 38.5,
                224: 112,
                255: 412.75,
            },
            "06077af8f608",
        ),
    }
)

assert set(PROBES) == set(PACKED) <= set(FORMATS)


def scaled_probe_rows(fmt: str, rows: int) -> torch.Tensor:
    """Probe rows with fp16 fields times ``i % 7 + 1``: row i's product is that multiple of ``dot``."""
    spec = get_packed_format(fmt)
    blocks = PROBES[fmt].rows(rows).numpy()
    for field in spec.fields:
        if field.kind == "f16":
            part = slice(spec.offset(field.name), spec.offset(field.name) + field.nbytes)
            values = np.ascontiguousarray(blocks[:, part]).view(np.float16)
            factor = (np.arange(rows) % 7 + 1).astype(np.float16)[:, None]
            blocks[:, part] = (values * factor).view(np.uint8)
    return torch.from_numpy(blocks)
