"""Every kernel on small odd shapes, each tensor as large as it has to be: for compute-sanitizer, and counted.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/kernel_tour.py [PART ...]

The parts can run side by side: rings, projections, tokens, Q4_K, Q6_K, Q5_0, rmsnorm, layernorm, and the
types of caches, float32, bfloat16, int8 and float8_e4m3fn.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator, Sequence

import torch
from cases import random_activations, random_blocks
from ring_shapes import launches_overlap, small_rings
from torch import Tensor

from realizar_torch import packing, triton_kernels
from realizar_torch.formats import get_packed_format
from realizar_torch.generation.prompt_rows import Piece, rows_of
from realizar_torch.nn.cache_rows import quantize_rows
from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.attention_kernel import attention_kernel
from realizar_torch.triton_kernels.configs import Launch
from realizar_torch.triton_kernels.dequantize import dequantize, embedding
from realizar_torch.triton_kernels.experts import expert_matvec, expert_matvec_int8
from realizar_torch.triton_kernels.gate_up import ACTIVATIONS, gate_up, gate_up_int8
from realizar_torch.triton_kernels.gated import gated
from realizar_torch.triton_kernels.grouped import Grouped, empty_grouped, ungrouped
from realizar_torch.triton_kernels.head_norms import norm_heads
from realizar_torch.triton_kernels.highest import highest_scratch, take_highest
from realizar_torch.triton_kernels.matmul import matmul
from realizar_torch.triton_kernels.matmul_gate_up import matmul_gate_up
from realizar_torch.triton_kernels.matmul_qkv import matmul_qkv
from realizar_torch.triton_kernels.matvec import matvec, matvec_int8
from realizar_torch.triton_kernels.prompt_attention import prompt_attention, prompt_block_rows
from realizar_torch.triton_kernels.prompt_heads import place_heads
from realizar_torch.triton_kernels.qkv import qkv, qkv_int8
from realizar_torch.triton_kernels.quantize import (
    NORMALIZATIONS,
    norm_quantize,
    normalize,
    quantize_activations,
)
from realizar_torch.triton_kernels.sampling import sample_rows, sampling_scratch

# each decoder's way of reading bytes: 16 at a time, in planes, and 2 at a time
WEIGHTS = (("Q4_K", "ggml"), ("Q6_K", "planar"), ("Q5_0", "ggml"))
# three super-blocks, the last of them ragged, and rows that end inside every tile
COLUMNS, ROWS = 600, 7
# vectors of matvecs, which take floats two at a time, and of tensor cores, which take groups of eight
FEW, MANY = 3, 9
POSITIONS, HEADS, KV_HEADS, CAPACITY = (0, 69), 6, 2, 70
_CACHE_PARTS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
}


def kernels_of_package() -> set[str]:
    """Names of what ``realizar_torch.triton_kernels`` launches: every ``name[grid](...)`` in its files."""
    names = set()
    for module in pkgutil.iter_modules(triton_kernels.__path__, triton_kernels.__name__ + "."):
        tree = ast.parse(inspect.getsource(importlib.import_module(module.name)))
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        names |= {ast.unparse(function.value) for function in calls if isinstance(function, ast.Subscript)}
    return names


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """The names of the kernels launched inside, compiled or interpreted."""
    kind, names = type(attention_kernel), set()
    run = kind.run

    def noted(kernel, *args, **options):
        names.add(kernel.fn.__name__)
        return run(kernel, *args, **options)

    kind.run = noted
    try:
        yield names
    finally:
        kind.run = run


def tour(device: torch.device, weights: Sequence[tuple[str, str]] = WEIGHTS) -> Iterator[Tensor]:
    """Launches every kernel; gives every tensor that one has written."""
    return itertools.chain.from_iterable(parts(device, weights).values())


def parts(device: torch.device, weights: Sequence[tuple[str, str]] = WEIGHTS) -> dict[str, Iterator[Tensor]]:
    """The tour by the names of its parts, which launch nothing until they are gone through."""
    found = {fmt: _products(fmt, layout, device) for fmt, layout in weights}
    found |= {"projections": _projections(device), "rings": _rings(device)}
    found |= {normalization: _norms(normalization, device) for normalization in NORMALIZATIONS}
    found |= {part: _attention(dtype, device) for part, dtype in _CACHE_PARTS.items()}
    return found | {"tokens": _tokens(device)}


def shared(device: torch.device) -> Iterator[Tensor]:
    """Of the kernels whose programs share memory: partial sums, or heads of one row."""
    found = parts(device)
    return itertools.chain.from_iterable(found[part] for part in (*_CACHE_PARTS, "tokens"))


def _weight(fmt: str, layout: str, device: torch.device, seed: int = 0, columns: int = COLUMNS) -> Tensor:
    return packing.pack(random_blocks(fmt, ROWS, columns, seed), fmt, layout).to(device)


def _activations(batch: int, device: torch.device, columns: int = COLUMNS) -> Tensor:
    return random_activations(batch, columns).to(device)


def _grouped(x: Tensor, width: int) -> Grouped:
    return quantize_activations(x, width, empty_grouped(len(x), width, x.device))


def _products(fmt: str, layout: str, device: torch.device) -> Iterator[Tensor]:
    """Whatever one format's decoder is a part of."""
    width = get_packed_format(fmt).blocks(COLUMNS) * get_packed_format(fmt).block_size
    weight, up = _weight(fmt, layout, device), _weight(fmt, layout, device, 1)
    bias = torch.randn(ROWS, device=device)
    one, pair = (weight, fmt, COLUMNS), (weight, up, fmt, COLUMNS)
    stack, chosen = torch.stack([weight, up]), torch.tensor([1, 0, 1], device=device)
    x, residual = _activations(FEW, device), torch.randn(FEW, ROWS, device=device)
    parts = quantize_activations(x, width)
    yield matvec(x, *one, bias, residual=residual, layout=layout)
    yield matvec_int8(*parts, *one, bias, residual=residual, layout=layout)
    yield matvec_int8(*parts, *one, layout=layout, launch=Launch(2, 1, 1, ahead=True))
    # one vector: these take the longest to compile
    yield gate_up(x[:1], *pair, layout=layout)
    yield gate_up_int8(*(part[:1] for part in parts), *pair, layout=layout)
    yield expert_matvec(x, chosen, stack, fmt, 1, layout=layout)
    yield expert_matvec_int8(*parts, chosen, stack, fmt, COLUMNS, 1, layout=layout)
    parts, residual = _grouped(_activations(MANY, device), width), torch.randn(MANY, ROWS, device=device)
    yield matmul(*parts, MANY, *one, bias, residual=residual, layout=layout)
    yield matmul_gate_up(*parts, MANY, *pair, layout=layout)
    yield dequantize(*one, torch.bfloat16, layout=layout)
    yield embedding(torch.tensor([ROWS - 1, 0], device=device), *one, layout=layout)


def _projections(device: torch.device) -> Iterator[Tensor]:
    columns, fmts, layouts = 768, ("Q4_K", "Q6_K", "Q5_0"), ("ggml", "planar", "ggml")
    weights = [_weight(*kind, device, columns=columns) for kind in zip(fmts, layouts, strict=True)]
    operands = (weights, fmts, columns, torch.randn(3 * ROWS, device=device))
    parts = quantize_activations(_activations(1, device, columns), columns)
    yield qkv_int8(*parts, *operands, layouts=layouts)
    parts = _grouped(_activations(MANY, device, columns), columns)
    yield matmul_qkv(*parts, MANY, *operands, layouts=layouts)


def _rings(device: torch.device) -> Iterator[Tensor]:
    """One vector, whose rows come through a ring: programs of several tiles each."""
    if not launches_overlap():
        return
    columns, fmts, layouts = 768, ("Q4_K", "Q8_0", "Q5_K"), ("ggml", "planar", "ggml")
    rows = 2 * ROWS
    weights = [
        packing.pack(random_blocks(fmt, rows, columns), fmt, layout).to(device)
        for fmt, layout in zip(fmts, layouts, strict=True)
    ]
    parts = quantize_activations(_activations(1, device, columns), columns)
    bias, residual = torch.randn(3 * rows, device=device), torch.randn(1, rows, device=device)
    one = (*parts, weights[0], fmts[0], columns)
    x = _activations(1, device, columns)
    with small_rings(2):
        yield matvec(x, *one[3:], bias[:rows], residual=residual)
        yield gate_up(x, weights[0], weights[0].clone(), fmts[0], columns)
        yield qkv(x, weights, fmts, columns, bias, layouts=layouts)
        yield matvec_int8(*one, bias[:rows], residual=residual, dependent=True)
        yield gate_up_int8(*parts, weights[0], weights[0].clone(), fmts[0], columns, dependent=True)
        yield qkv_int8(*parts, weights, fmts, columns, bias, layouts=layouts, dependent=True)


def _norms(normalization: str, device: torch.device) -> Iterator[Tensor]:
    """Residual sum and norm, as floats, int8 and grouped fp16, of rows and heads; activations alone."""
    x, residual = (torch.randn(MANY, COLUMNS, device=device) for _ in range(2))
    gain, shift = torch.rand(COLUMNS, device=device), torch.randn(COLUMNS, device=device)
    kind, total = {"normalization": normalization, "eps": 1e-6}, torch.full_like(x, torch.nan)
    yield normalize(x, gain, shift, residual=residual, total=total, **kind)
    yield total
    yield from norm_quantize(x, gain, shift, width=768, **kind)
    parts = norm_quantize(
        x, gain, width=768, residual=x, total=total, out=empty_grouped(MANY, 768, device), **kind
    )
    yield ungrouped(*parts[:2], MANY)
    heads = torch.randn(3, 5 * 24, device=device)
    norm_heads(heads, 24, 24, torch.rand(3 * 24, device=device), **kind)
    yield heads
    for activation in ACTIVATIONS:
        yield from quantize_activations(x, 768, activation=activation)
        yield gated(x, torch.full_like(x[:, ::2], torch.nan).contiguous(), activation=activation)


def _attention(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Decode and prompt attention up to the cache's last position, with heads that fill no power of two."""
    for dim, window in ((10, 0), (24, 0), (64, 33)):
        caches, scales = _caches(dtype, dim, device)
        qkv = torch.randn(len(POSITIONS), (HEADS + 2 * KV_HEADS) * dim, device=device)
        angles = [torch.rand(CAPACITY, dim // 2 - 2, device=device) for _ in range(2)]
        gains = {name: torch.rand(dim, device=device) for name in ("q_norm", "k_norm")}
        options = {"scale": 0.3, "window": window, **scales}
        for splits in (1, 2):
            found, int8 = decode_attention(
                qkv, *caches, torch.tensor(POSITIONS, device=device), *angles,
                starts=torch.tensor([0, 5], device=device), softcap=20.0 if window else 0.0, **gains,
                scratch=attention_scratch(len(POSITIONS), HEADS, KV_HEADS, dim, CAPACITY, device, splits),
                quantize=dim % 32 == 0, **options,
            )  # fmt: skip
            yield from (found, *(int8 or ()))
        yield from _prompt(caches, options, angles, gains, device)
        yield from (part.float() for part in (*caches, *scales.values()))


def _caches(dtype: torch.dtype, dim: int, device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
    """K and V, and the scales of 8-bit ones."""
    rows = [torch.randn(len(POSITIONS), KV_HEADS, CAPACITY, dim, device=device) for _ in range(2)]
    if dtype.itemsize > 1:
        return [part.to(dtype) for part in rows], {}
    packed = [quantize_rows(part, dtype) for part in rows]
    return [part for part, _ in packed], {"k_scales": packed[0][1], "v_scales": packed[1][1]}


def _prompt(
    caches: list[Tensor],
    options: dict[str, object],
    angles: list[Tensor],
    gains: dict[str, Tensor],
    device: torch.device,
) -> Iterator[Tensor]:
    """Two sequences behind caches that they fill."""
    dim, dtype = caches[0].shape[-1], torch.float32 if caches[0].dtype == torch.float32 else torch.bfloat16
    pieces = [Piece(1, CAPACITY - 4, 4), Piece(0, CAPACITY - 3, 3, 5)]
    q = torch.full((7, HEADS, dim), torch.nan, dtype=dtype, device=device)
    rows = rows_of(pieces, prompt_block_rows(dim, dtype.itemsize), device)
    turns = [part[rows.positions.long()] for part in angles]
    qkv = torch.randn(len(q), (HEADS + 2 * KV_HEADS) * dim, device=device)
    scales = {name: options[name] for name in ("k_scales", "v_scales") if name in options}
    place_heads(qkv, rows.places, *turns, q, *caches, **gains, **scales)
    yield q
    starts = torch.tensor([5, 0], device=device)
    yield prompt_attention(q, *caches, rows.blocks, starts, torch.full_like(q, torch.nan), **options)


def _tokens(device: torch.device) -> Iterator[Tensor]:
    """The highest of several chunks, and tokens drawn with every filter."""
    batch, vocabulary = 3, 2 * 2048 + 5
    logits, tokens = torch.randn(batch, vocabulary, device=device), torch.full((batch,), -7, device=device)
    take_highest(logits, tokens, highest_scratch(batch, device))
    yield tokens.clone()
    # temperature, top_p, min_p, penalty; top_k, seed, tokens chosen so far
    floats = torch.tensor([[0.0, 1, 0, 1], [0.8, 0.9, 0.01, 1.2], [1.5, 1, 0, 1]], dtype=torch.float64)
    integers = torch.tensor([[0, 1, 0], [40, 2, 0], [900, 3, 5]])
    seen = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)
    scratch = sampling_scratch(batch, vocabulary, device)
    sample_rows(logits, seen, floats.to(device), integers.to(device), tokens, scratch)
    yield tokens


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = parts(device)
    with launches() as names:
        written = sum(1 for part in sys.argv[1:] or found for _ in found[part])
    if device.type == "cuda":
        torch.cuda.synchronize()
    missing = set() if sys.argv[1:] else kernels_of_package() - names
    assert not missing, f"never launched: {sorted(missing)}"
    print(f"{len(names)} kernels launched, {written} tensors written")


if __name__ == "__main__":
    main()
