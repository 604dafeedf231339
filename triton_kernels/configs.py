"""Launch shapes: a pure function of format, shape and row count. Nothing is timed at run time."""

from dataclasses import dataclass

from realizar_torch.formats import get_packed_format
from realizar_torch.triton_kernels.blocks import planes, planes_per_scale, units


@dataclass(frozen=True)
class Launch:
    """``rows`` weight rows per program, ``blocks`` blocks of each per loop step, ``warps`` warps; ``ahead``:
    the bytes of a step are fetched while the step before is multiplied."""

    rows: int
    blocks: int
    warps: int
    ahead: bool = False


def _power_of_two_at_least(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def choose(
    fmt: str,
    rows: int,
    in_features: int,
    batch: int = 1,
    activations: str = "int8",
    *,
    pair: bool = False,
    several: bool = False,
) -> Launch:
    """The launch shape of a matvec with ``rows`` × ``in_features`` packed weights and ``batch`` activation
    vectors.

    A thread owns one unit of a block, so a loop step of ``blocks`` blocks occupies blocks × units lanes; more
    lanes than the row has units would idle. ``pair``: each program does the same rows of two weights;
    ``several``: the launch has more weights than this one.
    """
    per_block = units(fmt)
    blocks = get_packed_format(fmt).blocks(in_features)
    lanes = blocks * per_block
    # a scale for every 16 of a unit's 64 weights takes the most registers
    wide = planes(fmt) == 4 and planes_per_scale(fmt) == 1
    if batch > 4 or (batch > 2 and activations == "float"):
        per_program = 1
    elif batch > 2 or pair or activations == "float" or (wide and (several or batch > 1)):
        per_program = 2
    else:
        per_program = 4
    # few programs with long loops: too few bytes are on their way unless two steps overlap
    alone = not pair and not several and batch == 1 and activations == "int8"
    ahead = alone and planes(fmt) == 4 and lanes >= 128 and rows <= 8192
    if ahead:
        warps = min(_power_of_two_at_least(lanes) // 128, _power_of_two_at_least(4096 // rows), 8)
    elif wide and in_features > 8192 and activations == "int8":
        warps = 8
    else:
        warps = 1 if several else 2
    while warps > 1 and lanes < 32 * warps:
        warps //= 2
    # an idle part of the last loop step costs more than one step more
    while warps > 1 and (ahead or not wide) and lanes % (32 * warps):
        warps //= 2
    step = min(max(1, 32 * warps // per_block), _power_of_two_at_least(blocks))
    return Launch(min(per_program, _power_of_two_at_least(rows)), step, warps, ahead)


@dataclass(frozen=True)
class RingLaunch:
    """``rows`` weight rows a tile, ``stages`` tiles of a program on their way in a ring of ``bytes``;
    ``programs`` at once on the device, of ``warps`` warps with ``registers`` a thread."""

    rows: int
    stages: int
    warps: int
    registers: int
    bytes: int
    programs: int


# multiprocessors of an H100 or H200, and what each of them has
PROCESSORS, _REGISTERS, SHARED_BYTES = 132, 65536, 228 << 10
# shared memory of a program without asking for more, and what it takes beside its ring: its own and Triton's
_STATIC_BYTES, _OTHER_BYTES = 48 << 10, 1280
# of a ring; of one before attention, and of all those of a multiprocessor, which leave room for attention
_RING_BYTES, _SMALL_RING_BYTES, _SMALL_RINGS_BYTES = 36 << 10, 18 << 10, 130 << 10


def choose_ring(
    fmt: str,
    rows: int,
    in_features: int,
    weights: int = 1,
    *,
    activations: str = "int8",
    before_attention: bool = False,
    least_warps: int = 1,
    processors: int = PROCESSORS,
) -> RingLaunch | None:
    """The launch shape of a matvec of one vector through a ring in shared memory: ``weights`` of ``rows`` ×
    ``in_features`` done together, in a launch of at least ``least_warps`` warps. None where rows are too long
    or no whole 16-byte chunks.
    """
    spec = get_packed_format(fmt)
    row_bytes = spec.row_bytes(in_features)
    warps = max(least_warps, _power_of_two_at_least(spec.blocks(in_features) * units(fmt)) // 32)
    per_tile = max(1, (4 if warps <= 2 else 2) // weights)
    # a power of two, and no more than there are rows
    per_tile = min(per_tile, 1 << max(rows, 1).bit_length() - 1)
    tile = per_tile * weights * row_bytes
    while per_tile > 1 and 2 * tile + _OTHER_BYTES > _STATIC_BYTES:
        per_tile, tile = per_tile // 2, tile // 2
    if warps > 8 or row_bytes % 16 or 2 * tile + _OTHER_BYTES > _STATIC_BYTES:
        return None
    if before_attention:
        stages, room = max(1, min(3, _SMALL_RING_BYTES // tile)), _SMALL_RINGS_BYTES
    else:
        stages, room = max(2, min(3, _RING_BYTES // tile)), SHARED_BYTES
    most = 24 // warps
    if activations == "float":
        # a unit's floats stay in as many registers beside the bytes of all rows
        most = _REGISTERS // (32 * warps * (168 if warps <= 2 else 128))
    programs = max(1, min(room // (stages * tile + _OTHER_BYTES), most, 12))
    if not before_attention:
        # no more than a program has tiles: the successor finds room sooner
        stages = max(1, min(stages, -(-rows // (per_tile * programs * processors))))
    # what a thread may have for all programs to be there at once
    registers = min(255, _REGISTERS // (32 * warps * programs) // 8 * 8)
    return RingLaunch(per_tile, stages, warps, registers, stages * tile, programs * processors)


@dataclass(frozen=True)
class MatmulLaunch:
    """16 weight rows for each of ``row_warps`` warps and ``columns`` times eight activation vectors per
    program; ``k_warps`` warps share out K; at most ``registers`` per thread."""

    columns: int
    row_warps: int
    k_warps: int
    registers: int = 128

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps


# More vectors than this are cheaper as a product of decoded weights.
MATMUL_ROWS = 64


def choose_matmul(rows: int, in_features: int, batch: int, pair: bool = False) -> MatmulLaunch:
    """The launch shape of a tensor-core product of ``rows`` × ``in_features`` packed weights with ``batch``
    vectors; ``pair``: each program does the same rows of two weights.
    """
    columns = min(-(-batch // 8), 4)
    # about sixteen warps for each of some hundred multiprocessors; of many rows none need share K
    if pair:
        k_warps = 1 if columns > 2 and rows >= 12288 else 4
        registers = 255 if columns > 2 else 168
    else:
        k_warps, registers = 8 if rows <= 4608 else 4 if rows < 16384 else 1, 128
    row_warps = 4 if k_warps == 1 else 1
    k_warps = min(k_warps, _power_of_two_at_least(-(-in_features // 256)))
    return MatmulLaunch(columns, row_warps, k_warps, registers)


@dataclass(frozen=True)
class AttentionLaunch:
    """``tile`` positions of each of ``warps`` warps per step, ``stages`` steps in flight, the first ``ahead``
    fetched before the predecessor is waited for; runs of at least ``minimum`` steps, added ``merge`` at a
    time."""

    warps: int
    tile: int
    stages: int
    ahead: int
    minimum: int
    merge: int


def choose_attention(lanes: int, itemsize: int, rows: int) -> AttentionLaunch:
    """The launch shape of decode attention for K and V rows of ``lanes`` elements and ``rows`` query rows.

    A step of 16 bits or fewer takes at most 32 KB, runs are 256 positions or more; the sums of a warp fill
    half its registers.
    """
    tile = 32 if lanes * itemsize <= 128 else 16
    stages = 3 if itemsize < 4 else 1
    merge = max(4, min(16, 32768 // (rows * lanes)))
    return AttentionLaunch(4, tile, stages, 2, 256 // (4 * tile), merge)


def choose_splits(batch: int, kv_heads: int, capacity: int, processors: int = PROCESSORS) -> int:
    """Programs per (sequence, K/V head): two for every multiprocessor in all, none with less than 64
    positions.
    """
    wanted = max(1, 2 * processors // (batch * kv_heads))
    return min(wanted, -(-capacity // 64), 64)


def choose_norm_warps(blocks: int) -> int:
    """Warps of the one program that normalises ``blocks`` blocks of 32 (a power of two)."""
    return min(16, max(1, blocks // 8))


# Decoded weights held at a time by a product of many rows.
CHUNK_BYTES = 64 << 20


def choose_chunk(rows: int, in_features: int, itemsize: int) -> int:
    """Rows that are decoded at a time, of a product with ``rows`` rows: equal chunks, whole tiles of 128."""
    most = max(1, CHUNK_BYTES // (in_features * itemsize))
    even = -(-rows // -(-rows // most))
    return min(most, -(-even // 128) * 128)


@dataclass(frozen=True)
class PromptAttentionLaunch:
    """``rows`` queries per program against ``step`` keys at a time, ``stages`` steps in flight."""

    rows: int
    step: int
    stages: int
    warps: int


def choose_prompt_attention(lanes: int, itemsize: int) -> PromptAttentionLaunch:
    """The launch shape of prompt attention for heads of ``lanes`` elements of ``itemsize`` bytes."""
    if itemsize > 2:
        # fp32 products run on no matrix unit; this one is for exactness
        return PromptAttentionLaunch(16, 32, 1, 4)
    return PromptAttentionLaunch(128, 64, 3, 8) if lanes <= 128 else PromptAttentionLaunch(64, 32, 2, 4)
