"""The kernels of a GPU's decode step against float64, each called as the step calls it.

They also run in Triton's interpreter, on a CPU.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realizar_torch import packing, reference
from realizar_torch.diagnosis.parity import (
    TOLERANCE,
    Matrix,
    Parity,
    int8_values,
    product_share,
    random_vectors,
    share,
)
from realizar_torch.diagnosis.shapes import Shapes
from realizar_torch.formats import get_packed_format
from realizar_torch.ops.normalization import normalize
from realizar_torch.triton_kernels import matvec, quantize
from realizar_torch.triton_kernels.configs import choose, choose_matmul
from realizar_torch.triton_kernels.gate_up import ACTIVATIONS, gate_up, gate_up_int8
from realizar_torch.triton_kernels.grouped import Grouped, empty_grouped, ungrouped
from realizar_torch.triton_kernels.matmul import matmul
from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up
from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv
from realizar_torch.triton_kernels.qkv import qkv_int8

# vectors of a step for the matvecs, and for tensor cores, which take them in groups of eight
_SINGLE = (1, 2)
_BATCHED = (5, 16)
# matvecs of linears alone, which take up to eight
_MATVEC = (*_SINGLE, 5)
_EPS = 1e-5
# of |gate * up|: exp and the division of the activation cost a few ulp
_ACTIVATION_ERROR = 3e-6
# the largest slope of SiLU and GELU, rounded up
_SLOPE = 1.2


def check_kernels(shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    """What a step of a model with these shapes launches, for one and for several sequences."""
    for matrix in shapes.matrices:
        yield from _products(matrix, device)
    for width in dict.fromkeys(matrix.in_features for matrix in shapes.normed):
        yield from _norms(width, shapes, device)
    for projection in shapes.projections:
        yield from _projections(projection, device)
    for matrix in shapes.pairs:
        yield from _pairs(matrix, shapes, device)


def layout_of(fmt: str) -> str:
    """The layout that ``rt.prepack`` gives the format on a GPU."""
    return "ggml" if get_packed_format(fmt).block_bytes % 16 == 0 else "planar"


def _quantized(x: Tensor, matrix: Matrix) -> tuple[quantize.Int8Activations, Tensor]:
    """The kernel's own activations and what they stand for; ``_norms`` checks them themselves."""
    parts = quantize.quantize_activations(x, matrix.width)
    return parts, int8_values(parts[0], parts[1], matrix.in_features)


def _grouped(x: Tensor, matrix: Matrix) -> tuple[Grouped, Tensor]:
    """Likewise, for tensor cores."""
    parts = quantize.quantize_activations(x, matrix.width, empty_grouped(len(x), matrix.width, x.device))
    return parts, ungrouped(*parts[:2], len(x))[:, : matrix.in_features]


def _rounding(fmt: str, x: Tensor, decoded: Tensor) -> Tensor:
    """How far a tensor-core product of ``x`` may be off because its weights are fp16: see fragments.py."""
    magnitudes = x.abs() @ decoded.abs().T
    if get_packed_format(fmt).block_size == reference.ACTIVATION_BLOCK:
        # half of 2^-24, of a step's power of two at 2^-10: of a scale and of its zero point too
        largest = decoded.abs().amax(1)
        return 2.0**-12 * magnitudes + 2.0**-14 * x.abs().sum(1, keepdim=True) * largest
    # only scales of eight bits exceed eleven bits
    return (2.0**-12 if fmt == "Q6_K" else 0.0) * magnitudes


def _products(matrix: Matrix, device: torch.device) -> Iterator[Parity]:
    """Matvecs and the tensor-core product with bias and residual, launched as for the real number of rows."""
    blocks, decoded = matrix.sample(device)
    layout, columns = layout_of(matrix.fmt), matrix.in_features
    weight, rows = packing.pack(blocks, matrix.fmt, layout), len(blocks)
    where = (matrix.fmt, f"{matrix} {layout}")
    bias = random_vectors(device, rows, seed=1)
    for batch in (*_SINGLE, *_BATCHED):
        x, residual = random_vectors(device, batch, columns), random_vectors(device, batch, rows, seed=2)
        extra = bias.double() + residual.double()
        options = {"residual": residual, "layout": layout}
        operands = (weight, matrix.fmt, columns, bias)
        if batch in _MATVEC:
            launch = choose(matrix.fmt, matrix.rows, columns, min(batch, matvec.FLOAT_VECTORS), "float")
            y = matvec.matvec(x, *operands, launch=launch, **options)
            error = product_share(y, x.double(), decoded, extra)
            yield Parity(device.type, "matvec float", *where, batch, error)
            parts, seen = _quantized(x, matrix)
            launch = choose(matrix.fmt, matrix.rows, columns, batch, "int8")
            y = matvec.matvec_int8(*parts, *operands, launch=launch, **options)
            error = product_share(y, seen, decoded, extra)
            yield Parity(device.type, "matvec int8", *where, batch, error)
        if batch in _BATCHED:
            parts, seen = _grouped(x, matrix)
            wide = choose_matmul(matrix.rows, columns, batch)
            y = matmul(*parts, batch, *operands, launch=wide, **options)
            error = product_share(y, seen, decoded, extra, rounding=_rounding(matrix.fmt, seen, decoded))
            yield Parity(device.type, "matmul", *where, batch, error)


def _norms(width: int, shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    """Residual sum and norm, as floats and as int8, and plain int8 activations, which are exact."""
    assert shapes.config is not None
    normalization = shapes.config.arch.normalization
    kind = {"normalization": normalization, "eps": _EPS}
    padded = max(matrix.width for matrix in shapes.normed if matrix.in_features == width)
    x, residual = random_vectors(device, 2, width), random_vectors(device, 2, width, seed=1)
    gain, shift = (1 + random_vectors(device, width, seed=seed) / 30 for seed in (2, 3))
    expected = normalize((x + residual).double(), gain.double(), shift.double(), normalization, _EPS)
    # one rounding per operation of the norm, and the sums of its statistics
    allowed = TOLERANCE * (expected.abs() + shift.double().abs())
    shape = f"{width} wide"

    total = torch.empty_like(x)
    found = quantize.normalize(x, gain, shift, residual=residual, total=total, **kind)
    error = max(share(found, expected, allowed), share(total, x + residual, 0))
    yield Parity(device.type, "normalize", "", shape, 2, error)

    q, scale, _ = quantize.norm_quantize(x, gain, shift, width=padded, residual=residual, total=total, **kind)
    # half a step of each block
    step = scale.double().repeat_interleave(reference.ACTIVATION_BLOCK, -1)[:, :width]
    error = share(int8_values(q, scale, width), expected, 0.501 * step + allowed)
    yield Parity(device.type, "norm_quantize", "", shape, 2, error)

    exact = reference.quantize_activations(x.cpu(), "Q8_0")
    parts = quantize.quantize_activations(x, exact.q.shape[-1])
    wanted = (exact.q, exact.scale, exact.sums)
    error = max(share(found.cpu(), right, 0) for found, right in zip(parts, wanted, strict=True))
    yield Parity(device.type, "quantize_activations", "", shape, 2, error)


def _projections(projection: Sequence[Matrix], device: torch.device) -> Iterator[Parity]:
    """q, k and v in one launch, with a bias."""
    samples = [matrix.sample(device, seed) for seed, matrix in enumerate(projection)]
    decoded = torch.cat([weights for _, weights in samples])
    fmts, columns = [matrix.fmt for matrix in projection], projection[0].in_features
    if len({matrix.width for matrix in projection}) > 1:
        return
    layouts = [layout_of(fmt) for fmt in fmts]
    packed = [
        packing.pack(blocks, fmt, layout)
        for (blocks, _), fmt, layout in zip(samples, fmts, layouts, strict=True)
    ]
    bias = random_vectors(device, len(decoded), seed=3)
    shape = "+".join(str(matrix.rows) for matrix in projection) + f"x{columns}"
    for batch in (*_SINGLE, *_BATCHED):
        x, operands = random_vectors(device, batch, columns), (packed, fmts, columns, bias)
        if batch in _SINGLE:
            parts, seen = _quantized(x, projection[0])
            launches = [
                choose(matrix.fmt, matrix.rows, columns, batch, "int8", several=True) for matrix in projection
            ]
            y = qkv_int8(*parts, *operands, layouts=layouts, launches=launches)
            error = product_share(y, seen, decoded, bias)
        else:
            parts, seen = _grouped(x, projection[0])
            wide = choose_matmul(sum(matrix.rows for matrix in projection), columns, batch)
            y = matmul_qkv(*parts, batch, *operands, layouts=layouts, launch=wide)
            each = zip(fmts, samples, strict=True)
            rounding = torch.cat([_rounding(fmt, seen, weights) for fmt, (_, weights) in each], 1)
            error = product_share(y, seen, decoded, bias, rounding=rounding)
        name = "qkv int8" if batch in _SINGLE else "matmul_qkv"
        yield Parity(device.type, name, "+".join(dict.fromkeys(fmts)), shape, batch, error)


def _pairs(matrix: Matrix, shapes: Shapes, device: torch.device) -> Iterator[Parity]:
    """act(gate x) * (up x) in one launch."""
    assert shapes.config is not None
    activation = shapes.config.arch.activation
    if activation not in ACTIVATIONS:
        return
    samples = [matrix.sample(device, seed) for seed in (0, 1)]
    layout = layout_of(matrix.fmt)
    gate, up = (packing.pack(blocks, matrix.fmt, layout) for blocks, _ in samples)
    columns, options = matrix.in_features, {"activation": activation, "layout": layout}
    both, where = [decoded for _, decoded in samples], (matrix.fmt, f"{matrix} {layout}")
    operands = (gate, up, matrix.fmt, columns)
    for batch in (*_SINGLE, *_BATCHED):
        x = random_vectors(device, batch, columns) / 8
        rounding: Sequence[Tensor | float] = (0.0, 0.0)
        if batch in _SINGLE:
            parts, seen = _quantized(x, matrix)
            launch = choose(matrix.fmt, matrix.rows, columns, batch, "float")
            y = gate_up(x, *operands, launch=launch, **options)
            error = _gated_share(y, x.double(), both, activation)
            yield Parity(device.type, "gate_up float", *where, batch, error)
            launch = choose(matrix.fmt, matrix.rows, columns, batch, "int8", pair=True)
            y = gate_up_int8(*parts, *operands, launch=launch, **options)
        else:
            wide = choose_matmul(matrix.rows, columns, batch, pair=True)
            parts, seen = _grouped(x, matrix)
            y = matmul_gate_up(*parts, batch, *operands, launch=wide, **options)
            rounding = [_rounding(matrix.fmt, seen, weights) for weights in both]
        name = "gate_up int8" if batch in _SINGLE else "matmul_gate_up"
        yield Parity(device.type, name, *where, batch, _gated_share(y, seen, both, activation, rounding))


def _gated_share(
    found: Tensor,
    x: Tensor,
    decoded: Sequence[Tensor],
    activation: str,
    rounding: Sequence[Tensor | float] = (0.0, 0.0),
) -> float:
    gate, up = (x @ weights.T for weights in decoded)
    gate_error, up_error = (
        TOLERANCE * (x.abs() @ weights.abs().T) + own for weights, own in zip(decoded, rounding, strict=True)
    )
    if activation == "silu":
        active = torch.nn.functional.silu(gate)
    else:
        approximation = "tanh" if activation == "gelu_tanh" else "none"
        active = torch.nn.functional.gelu(gate, approximate=approximation)
    allowed = _SLOPE * gate_error * up.abs() + up_error * active.abs()
    return share(found, active * up, allowed + _ACTIVATION_ERROR * (active * up).abs() + 1e-9)
