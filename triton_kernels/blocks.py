"""Where the bytes of a packed block lie, and how a block is shared out among threads, per format.

A thread owns a *unit*: 16-byte runs that it loads whole. A unit holds P *planes*; a plane is 16 consecutive
weights. Plane p of unit u holds group (u // H) * H * P + H * p + u % H of the block's groups of 16. S
successive planes have one scale.

A field of block b lies at ``row + b * block_bytes + offset`` (layout "ggml") or ``row + blocks * offset + b *
field_bytes`` ("planar").
"""

import math

import triton
import triton.language as tl

from realizar_torch.formats import PACKED_FORMATS, get_packed_format

# Tables are constexpr so that Triton's caches key on their content. fmt: (units per block, planes per unit,
# units per 32-weight run, planes per scale, zero point, bits that each scale's planes lie above the ones
# before: masking quants in place, without shifting them down, saves an instruction per word)
_SHAPES = tl.constexpr(
    {
        "Q4_0": (1, 2, 1, 1, 8, 4),
        "Q4_1": (1, 2, 1, 1, 0, 4),
        "Q5_0": (1, 2, 1, 2, 16, 0),
        "Q5_1": (1, 2, 1, 2, 0, 0),
        "Q8_0": (1, 2, 1, 2, 0, 0),
        "Q2_K": (4, 4, 2, 1, 0, 2),
        "Q3_K": (4, 4, 2, 1, 4, 0),
        "Q4_K": (4, 4, 1, 2, 0, 4),
        "Q5_K": (4, 4, 1, 2, 0, 0),
        "Q6_K": (4, 4, 2, 1, 32, 0),
    }
)
_SIZES = tl.constexpr({fmt.name: (fmt.block_size, fmt.block_bytes) for fmt in PACKED_FORMATS})
_FIELDS = tl.constexpr(
    {(fmt.name, f.name): (fmt.offset(f.name), f.nbytes) for fmt in PACKED_FORMATS for f in fmt.fields}
)
# Their 16-byte header is read in one load, which needs it in one piece.
GGML_ONLY = ("Q4_K", "Q5_K")


@triton.constexpr_function
def units(fmt):
    return _SHAPES.value[fmt][0]


@triton.constexpr_function
def planes(fmt):
    return _SHAPES.value[fmt][1]


@triton.constexpr_function
def run_units(fmt):
    return _SHAPES.value[fmt][2]


@triton.constexpr_function
def planes_per_scale(fmt):
    return _SHAPES.value[fmt][3]


@triton.constexpr_function
def zero_point(fmt):
    return _SHAPES.value[fmt][4]


@triton.constexpr_function
def lift(fmt, plane):
    return 1 << (plane // planes_per_scale(fmt) * _SHAPES.value[fmt][5])


@triton.constexpr_function
def has_sub_scales(fmt):
    return fmt.endswith("_K")


@triton.constexpr_function
def has_minimum(fmt):
    return (fmt, "m") in _FIELDS.value or (fmt, "dmin") in _FIELDS.value


@triton.constexpr_function
def signed_quants(fmt):
    return fmt == "Q8_0"


@triton.constexpr_function
def block_size(fmt):
    return _SIZES.value[fmt][0]


@triton.constexpr_function
def block_bytes(fmt):
    return _SIZES.value[fmt][1]


@triton.constexpr_function
def offset(fmt, field):
    return _FIELDS.value[fmt, field][0]


@triton.constexpr_function
def field_bytes(fmt, field):
    return _FIELDS.value[fmt, field][1]


def alignment(fmt: str, layout: str, pointer: int, row_stride: int, blocks: int) -> int:
    """The largest power of two (2 to 16) dividing every address that the decoder reads as 32-bit words."""
    found = get_packed_format(fmt)
    # the scales of these are read with the header, from the beginning of the block
    ahead = ("scales",) if fmt in GGML_ONLY else ()
    wide = [field.name for field in found.fields if field.nbytes >= 4 and field.name not in ahead]
    if layout == "ggml":
        steps = [found.block_bytes, *(found.offset(name) for name in wide)]
    else:
        steps = [blocks * found.offset(name) for name in wide]
        steps += [field.nbytes for field in found.fields if field.nbytes >= 4]
    return math.gcd(16, pointer, row_stride, *steps)


@triton.jit
def field(block, blocks, FMT: tl.constexpr, NAME: tl.constexpr, PLANAR: tl.constexpr):
    """Bytes from the start of a row to a field of ``block``."""
    if PLANAR:
        return blocks * offset(FMT, NAME) + block * field_bytes(FMT, NAME)
    else:
        return block * block_bytes(FMT) + offset(FMT, NAME)


@triton.constexpr_function
def groups_ahead(fmt, plane):
    """By how many groups of 16 weights a plane lies behind its unit's first."""
    return run_units(fmt) * plane


@triton.jit
def group_of(unit, plane, FMT: tl.constexpr):
    """Which 16 weights of the block a plane of a unit holds."""
    H: tl.constexpr = run_units(FMT)
    return (unit // H) * (H * planes(FMT)) + unit % H + groups_ahead(FMT, plane)
