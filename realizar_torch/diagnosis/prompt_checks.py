"""A GPU's prompts against float64: heads to their cache rows, attention of many rows; norms of heads."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realizar_torch.diagnosis.head_oracle import attended, storage_error, stored, turned
from realizar_torch.diagnosis.parity import TOLERANCE, Parity, random_vectors, share
from realizar_torch.generation.prompt_rows import Piece, rows_of
from realizar_torch.models.config import ModelConfig
from realizar_torch.nn.cache_rows import LARGEST, quantize_rows
from realizar_torch.ops.normalization import normalize
from realizar_torch.triton_kernels.head_norms import norm_heads
from realizar_torch.triton_kernels.prompt_attention import prompt_attention, prompt_block_rows
from realizar_torch.triton_kernels.prompt_heads import place_heads

_CAPACITY, _WINDOW = 96, 24
# a sequence that goes on behind its cache, which begins late, and one from its beginning
_PIECES = (Piece(1, 40, 21, 7), Piece(0, 0, 70))
_STARTS = (0, 7)
_EPS = 1e-6
# of what attention gives for |V|: fp32 rounds scores up to 10 and sums of 96 terms; 8 bits are
# read in fp16, which rounds to eleven bits, twice
_SUM_ERROR, _READ_ERROR = 2e-5, 2 * 2.0**-11


def check_prompts(
    config: ModelConfig, device: torch.device, dtypes: Sequence[torch.dtype]
) -> Iterator[Parity]:
    """With each window that layers of the model have, and caches of ``dtypes``."""
    yield _norm_heads(config, device)
    windows = dict.fromkeys(config.window(layer) or 0 for layer in range(config.num_layers))
    for window, dtype in itertools.product(windows, dtypes):
        yield from _prompt(config, min(window, _WINDOW), dtype, device)


def _norm_heads(config: ModelConfig, device: torch.device) -> Parity:
    """The query heads between other columns, which stay as they are."""
    kind, dim, width = config.arch.normalization, config.head_dim, config.q_dim
    rows = random_vectors(device, 2, width + 2 * dim)
    gain = 1 + random_vectors(device, width, seed=1) / 30
    heads = rows[:, dim:-dim].double().unflatten(1, (-1, dim))
    normed = normalize(heads, torch.ones_like(heads[0, 0]), None, kind, _EPS).flatten(1) * gain.double()
    expected = torch.cat([rows[:, :dim].double(), normed, rows[:, -dim:].double()], 1)
    inside = torch.zeros_like(expected)
    inside[:, dim:-dim] = TOLERANCE * (normed.abs() + gain.double().abs())
    norm_heads(rows, dim, dim, gain, normalization=kind, eps=_EPS)
    shape = f"{config.num_heads} heads of {dim}"
    return Parity(device.type, "norm_heads", "", shape, 2, share(rows, expected, inside))


def _prompt(
    config: ModelConfig, window: int, cache_dtype: torch.dtype, device: torch.device
) -> Iterator[Parity]:
    """Heads into the cache, then attention over it with the queries that the kernel gave."""
    generator = torch.Generator().manual_seed(window)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    dtype = torch.float32 if cache_dtype == torch.float32 else torch.bfloat16
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    rows = rows_of(_PIECES, prompt_block_rows(dim, dtype.itemsize), device)
    qkv = normal(len(rows.places), (heads + 2 * kv_heads) * dim).to(dtype)
    angles = 3 * normal(_CAPACITY, config.rotary_dim // 2)[rows.positions]
    cos, sin = angles.cos(), angles.sin()
    gains = {name: 1 + 0.1 * normal(dim) for name in ("q_norm", "k_norm")}
    gains = gains if config.arch.qk_norm == "head" else {}
    caches, scales = [], []
    for _ in "kv":
        floats = normal(len(_STARTS), kv_heads, _CAPACITY, dim)
        packed = (
            quantize_rows(floats, cache_dtype) if cache_dtype in LARGEST else (floats.to(cache_dtype), None)
        )
        caches.append(packed[0])
        scales.append(packed[1])
    before = [stored(*pair) for pair in zip(caches, scales, strict=True)]
    options = {} if scales[0] is None else dict(zip(("k_scales", "v_scales"), scales, strict=True))
    q = torch.empty(len(qkv), heads, dim, dtype=dtype, device=device)
    place_heads(qkv, rows.places, cos, sin, q, *caches, eps=_EPS, **gains, **options)

    expected = list(qkv.double().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1))
    for index, gain in enumerate(gains.values()):
        expected[index] = normalize(expected[index], gain.double(), None, "rmsnorm", _EPS)
    expected[:2] = (turned(part, cos, sin) for part in expected[:2])
    error = share(q, expected[0], storage_error(expected[0], dtype, True))
    sequence, slot = rows.places.long().T
    after = [stored(*pair) for pair in zip(caches, scales, strict=True)]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        right, allowed = old.clone(), torch.zeros_like(old)
        right[sequence, :, slot] = expected[1 + index]
        allowed[sequence, :, slot] = storage_error(expected[1 + index], cache_dtype, index == 0)
        error = max(error, share(new, right, allowed))
    shape = f"{heads}/{kv_heads} heads of {dim}" + (f", window {window}" if window else "")
    where = (str(cache_dtype).removeprefix("torch."), shape, len(qkv))
    yield Parity(device.type, "place_heads", *where, error)

    starts = torch.tensor(_STARTS, device=device)
    found = prompt_attention(
        q, *caches, rows.blocks, starts, torch.empty_like(q), scale=dim**-0.5, window=window, **options
    )
    # shares and result are rounded to the dtype, by half its eps each
    rounding = torch.finfo(dtype).eps + (_SUM_ERROR if scales[0] is None else _READ_ERROR)
    at, first, error = torch.arange(_CAPACITY, device=device), 0, 0.0
    for piece in _PIECES:
        part = slice(first, first + piece.count)
        now, first = slot[part, None], part.stop
        seen = (at >= _STARTS[piece.sequence]) & (at <= now) & (at > now - (window or _CAPACITY))
        keys, values = (rows[piece.sequence] for rows in after)
        exact, size = (attended(q[part].double(), keys, v, seen, dim**-0.5) for v in (values, values.abs()))
        error = max(error, share(found[part], exact, rounding * size))
    yield Parity(device.type, "prompt_attention", *where, error)
