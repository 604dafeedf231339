"""A GPU's decode attention against float64: norms of heads, rotation, cache write, softmax, int8 result."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from realizar_torch import reference
from realizar_torch.diagnosis.head_oracle import attended, storage_error, stored, turned
from realizar_torch.diagnosis.parity import Parity, share
from realizar_torch.models.config import ModelConfig
from realizar_torch.nn.cache_rows import LARGEST, quantize_rows
from realizar_torch.ops.normalization import normalize
from realizar_torch.triton_kernels.attention import decode_attention

_CAPACITY = 320
# first position, one in the middle of a tile, the last
_POSITIONS = (0, 131, _CAPACITY - 1)
# fp32: sums of 320 terms. Else a query and probabilities are rounded to the cache's type, 2^-9 of scores and
# values up to 5; 8 bits are read in fp16, which has three bits more
_ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.int8: 4e-3, torch.float8_e4m3fn: 4e-3}
_EPS = 1e-6


def check_attention(
    config: ModelConfig, device: torch.device, dtypes: Sequence[torch.dtype]
) -> Iterator[Parity]:
    """With each window that layers of the model have, and caches of ``dtypes``."""
    layers = range(config.num_layers)
    windows = dict.fromkeys(config.window(layer) or 0 for layer in layers)
    for batch, window, dtype in itertools.product((1, len(_POSITIONS)), windows, dtypes):
        yield _Case(config, batch, window, dtype, device).compare()


class _Case:
    """Random heads of ``batch`` sequences and a random cache; the last of _POSITIONS are theirs."""

    def __init__(
        self, config: ModelConfig, batch: int, window: int, dtype: torch.dtype, device: torch.device
    ):
        generator = torch.Generator().manual_seed(batch)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

        self.config, self.window, self.dtype = config, min(window, _CAPACITY // 2), dtype
        self.positions = torch.tensor(_POSITIONS[-batch:], device=device)
        heads, dim = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        self.qkv = normal(batch, heads * dim)
        rows = [normal(batch, config.num_kv_heads, _CAPACITY, dim) for _ in "kv"]
        self.scales: dict[str, Tensor] = {}
        if dtype in LARGEST:
            (self.k, k_scales), (self.v, v_scales) = (quantize_rows(part, dtype) for part in rows)
            self.scales = {"k_scales": k_scales, "v_scales": v_scales}
        else:
            self.k, self.v = (part.to(dtype) for part in rows)
        angles = 3 * torch.rand(
            _CAPACITY, config.rotary_dim // 2, generator=generator, dtype=torch.float32, device="cpu"
        ).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        gains = {name: 1 + 0.1 * normal(dim) for name in ("q_norm", "k_norm")}
        # other norms are launches of their own
        self.gains = gains if config.arch.qk_norm == "head" else {}
        # scores of size 1
        self.scale = dim**-0.5

    def compare(self) -> Parity:
        config, dim = self.config, self.config.head_dim
        quantize = dim % reference.ACTIVATION_BLOCK == 0
        q, k, v = self._new_heads()
        before = self._stored()
        out, int8 = decode_attention(
            self.qkv, self.k, self.v, self.positions, self.cos, self.sin,
            scale=self.scale, window=self.window, softcap=config.attention_softcap, quantize=quantize,
            eps=_EPS, **self.scales, **self.gains,
        )  # fmt: skip
        after = self._stored()
        error = share(out, self._expected(q, *after), _ALLOWED[self.dtype])
        # floats are rounded once, and nothing else is done to values
        v = v if self.scales else v.to(self.dtype).double()
        for old, found, new, is_key in zip(before, after, (k, v), (True, False), strict=True):
            expected, allowed = old.clone(), torch.zeros_like(old)
            row = torch.arange(len(out))
            expected[row, :, self.positions] = new
            allowed[row, :, self.positions] = storage_error(new, self.dtype, is_key)
            error = max(error, share(found, expected, allowed))
        if int8 is not None:
            exact = reference.quantize_activations(out.cpu(), "Q8_0")
            error = max(error, share(int8[0].cpu(), exact.q, 0), share(int8[1].cpu(), exact.scale, 0))
        shape = f"{config.num_heads}/{config.num_kv_heads} heads of {dim}"
        shape += f", window {self.window}" if self.window else ""
        kind = str(self.dtype).removeprefix("torch.")
        return Parity(out.device.type, "attention", kind, shape, len(out), error)

    def _new_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and turned q and k and the new v, float64 ``[batch, heads, dim]``."""
        config = self.config
        counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = self.qkv.double().view(len(self.qkv), -1, config.head_dim).split(counts, 1)
        if self.gains:
            q, k = (
                normalize(x, gain.double(), None, "rmsnorm", _EPS)
                for x, gain in zip((q, k), self.gains.values(), strict=True)
            )
        cos, sin = (part[self.positions] for part in (self.cos, self.sin))
        return turned(q, cos, sin), turned(k, cos, sin), v

    def _stored(self) -> tuple[Tensor, Tensor]:
        scales = self.scales
        return stored(self.k, scales.get("k_scales")), stored(self.v, scales.get("v_scales"))

    def _expected(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What the new queries see in the cache, their own rows included."""
        at, now = torch.arange(_CAPACITY, device=q.device), self.positions[:, None]
        seen = (at <= now) & (at > now - self.window if self.window else at >= 0)
        softcap = self.config.attention_softcap
        rows = [
            attended(q[n : n + 1], keys[n], values[n], seen[n : n + 1], self.scale, softcap)
            for n in range(len(q))
        ]
        return torch.cat(rows).flatten(1)
