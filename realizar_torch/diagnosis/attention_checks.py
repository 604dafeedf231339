"""A GPU's decode attention against float64: norms of heads, rotation, cache write, softmax, int8 result."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from realizar_torch import reference
from realizar_torch.diagnosis.parity import Parity, share
from realizar_torch.models.config import ModelConfig
from realizar_torch.ops.normalization import normalize
from realizar_torch.triton_kernels.attention import decode_attention

_CAPACITY = 320
# first position, one in the middle of a tile, the last
_POSITIONS = (0, 131, _CAPACITY - 1)
# fp32: sums of 320 terms. Else a query and probabilities are rounded to the cache's type, 2^-9 of scores and
# values up to 5
_ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
_ROTATION_ERROR = 1e-5
_EPS = 1e-6


def check_attention(config: ModelConfig, device: torch.device) -> Iterator[Parity]:
    """With each window that layers of the model have."""
    layers = range(config.num_layers)
    windows = dict.fromkeys(config.window(layer) or 0 for layer in layers)
    for batch, window, dtype in itertools.product((1, len(_POSITIONS)), windows, _ALLOWED):
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
        self.k, self.v = (normal(batch, config.num_kv_heads, _CAPACITY, dim).to(dtype) for _ in "kv")
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
        before = self.k.clone(), self.v.clone()
        out, int8 = decode_attention(
            self.qkv, self.k, self.v, self.positions, self.cos, self.sin,
            scale=self.scale, window=self.window, softcap=config.attention_softcap, quantize=quantize,
            eps=_EPS, **self.gains,
        )  # fmt: skip
        error = share(out, self._expected(q, before, k, v), _ALLOWED[self.dtype])
        # one rounding to the cache's type, of values up to 5
        rounding = _ROTATION_ERROR if self.dtype == torch.float32 else 5 * 2**-8
        for cache, old, new, allowed in (
            (self.k, before[0], k, rounding),
            (self.v, before[1], v.to(self.dtype), 0),
        ):
            expected = old.double()
            expected[torch.arange(len(out)), :, self.positions] = new.double()
            error = max(error, share(cache, expected, torch.where(expected == old, 0.0, allowed)))
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
        turn = torch.complex(self.cos.double(), self.sin.double())[self.positions][:, None]

        def turned(x: Tensor) -> Tensor:
            """Halves of the first rotary_dim elements as parts of complex numbers."""
            first, second = x[..., : config.rotary_dim].chunk(2, -1)
            z = torch.complex(first, second) * turn
            return torch.cat([z.real, z.imag, x[..., config.rotary_dim :]], -1)

        return turned(q), turned(k), v

    def _expected(self, q: Tensor, cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> Tensor:
        group, softcap = q.shape[1] // k.shape[1], self.config.attention_softcap
        keys, values = (part.double() for part in cache)
        row = torch.arange(len(q))
        keys[row, :, self.positions] = k.to(self.dtype).double()
        values[row, :, self.positions] = v.to(self.dtype).double()
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = (keys @ q[..., None]).squeeze(-1) * self.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at, now = torch.arange(_CAPACITY, device=q.device), self.positions[:, None]
        seen = (at <= now) & (at > now - self.window if self.window else at >= 0)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        return (scores.softmax(-1)[..., None, :] @ values).flatten(1)
