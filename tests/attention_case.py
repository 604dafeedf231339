"""A case of decode attention: random caches, the heads of new positions, and the answer in float64."""

import torch

from realizar_torch.nn.cache_rows import dequantize_rows, quantize_rows
from realizar_torch.triton_kernels.attention import decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ``[..., D]`` float64, cos and sin ``[..., R/2]``: halves turned, written with complex numbers."""
    turn = torch.complex(cos.double(), sin.double())
    head, tail = x[..., : 2 * turn.shape[-1]], x[..., 2 * turn.shape[-1] :]
    first, second = head.chunk(2, -1)
    z = torch.complex(first, second) * turn
    return torch.cat([z.real, z.imag, tail], -1)


class AttentionCase:
    """Random caches with ``positions`` known rows per sequence, new heads, and the float64 answer."""

    def __init__(
        self, positions, dtype, *, q_heads=6, kv_heads=2, dim=32, capacity=300, rotary=24, normed=False
    ):
        batch = len(positions)
        self.scale, self.positions = 0.25, torch.tensor(positions, device=DEVICE)
        self.qkv = torch.randn(batch, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
        # strided views, as layers of one allocation are
        self.store = torch.randn(batch, capacity, 2, kv_heads, dim, device=DEVICE).to(dtype)
        self.k, self.v = self.store[:, :, 0].transpose(1, 2), self.store[:, :, 1].transpose(1, 2)
        angles = 3 * torch.rand(capacity, rotary // 2, device=DEVICE)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = {}
        if normed:
            gains = {name: torch.rand(dim, device=DEVICE) + 0.5 for name in ("q_norm", "k_norm")}
            self.norms = gains | {"eps": 1e-6, "zero_centered": True}
        self.heads = self.qkv.double().view(batch, -1, dim).split([q_heads, kv_heads, kv_heads], 1)

        self.scales = {}

    def pack(self, dtype):
        """Both caches in an 8-bit type; k and v become what a reader sees."""
        (k, k_scales), (v, v_scales) = (quantize_rows(rows, dtype) for rows in (self.k, self.v))
        self.scales = {"k_scales": k_scales, "v_scales": v_scales}
        self.k, self.v = (dequantize_rows(*pair, torch.float64) for pair in ((k, k_scales), (v, v_scales)))
        return k, v

    def run(self, **options):
        options |= {"scale": self.scale} | self.norms
        return decode_attention(self.qkv, self.k, self.v, self.positions, self.cos, self.sin, **options)

    def new_heads(self, starts=None):
        """Rotated q and k and the new v of every sequence, float64 ``[batch, heads, D]``."""
        q, k, v = self.heads
        if self.norms:
            q, k = (
                p / (p.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.norms[name].double())
                for p, name in ((q, "q_norm"), (k, "k_norm"))
            )
        at = self.positions - (0 if starts is None else starts)
        return *(rotated(p, self.cos[at][:, None], self.sin[at][:, None]) for p in (q, k)), v

    def expected(self, starts=None, window=0, softcap=0.0, stored=False):
        """``stored``: the new rows as the caches hold them."""
        q, k_new, v_new = self.new_heads(starts)
        dtype, group = self.k.dtype, q.shape[1] // k_new.shape[1]
        out = torch.zeros_like(q)
        for b, position in enumerate(self.positions.tolist()):
            start = 0 if starts is None else int(starts[b])
            if window:
                start = max(start, position + 1 - window)
            if stored:
                k_new[b], v_new[b] = self.k[b, :, position], self.v[b, :, position]
            for h in range(q.shape[1]):
                keys = torch.cat(
                    [self.k[b, h // group, start:position], k_new[b, h // group, None].to(dtype)]
                )
                values = torch.cat(
                    [self.v[b, h // group, start:position], v_new[b, h // group, None].to(dtype)]
                )
                score = keys.double() @ q[b, h] * self.scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                out[b, h] = score.softmax(0) @ values.double()
        return out.flatten(1)


# a query and probabilities rounded to the cache's type: 2^-8 of |score| <= 4 and of |v| <= 4 for bf16
ATTENTION_TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
