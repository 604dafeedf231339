"""Causal self-attention with grouped key/value heads, over a KVCache or over the given tokens alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.norm import PerHeadNorm, RMSNorm
from realizar_torch.nn.projection import project
from realizar_torch.nn.rope import rotate


@dataclass(frozen=True)
class AttentionInputs:
    """What all layers of one kind (global or sliding) share in one forward pass.

    ``cos``/``sin``: fp32 [B, 1, T, rotary_dim/2]. ``mask``: bool [B, 1, T, S], True where a query may look;
    None means plainly causal for T > 1 and everything for T = 1. ``q_scale``: fp32 [B, 1, T, 1], a factor on
    the queries of each position, or None.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    q_scale: Tensor | None = None


class Attention(nn.Module):
    """Projections, optional norm of q and k, rotary embedding, scaled dot product, output projection.

    The projections are given by the caller (packed or dense). ``q_norm``/``k_norm`` may be None; they norm
    each head, or all heads at once where they are that wide. ``rotary``: this layer rotates q and k.
    ``softcap`` c > 0 replaces every scaled score s by c·tanh(s/c).
    """

    # packed or dense linears, or adapters around one
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def __init__(
        self,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        o_proj: nn.Module,
        *,
        head_dim: int,
        scale: float,
        q_norm: RMSNorm | PerHeadNorm | None = None,
        k_norm: RMSNorm | PerHeadNorm | None = None,
        rotary: bool = True,
        softcap: float = 0.0,
    ):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = q_proj, k_proj, v_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm
        self.head_dim, self.scale = head_dim, scale
        self.rotary, self.softcap = rotary, softcap

    def forward(
        self, x: Tensor, inputs: AttentionInputs, cache: KVCache | None = None, layer: int = 0
    ) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; a cache gets the new keys and values of ``layer``."""
        batch, count, _ = x.shape
        q, k, v = project(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self._heads(q, self.q_norm), self._heads(k, self.k_norm), self._heads(v, None)
        if self.rotary:
            q, k = rotate(q, inputs.cos, inputs.sin), rotate(k, inputs.cos, inputs.sin)
        if inputs.q_scale is not None:
            q = (q * inputs.q_scale).to(q.dtype)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        y = attend(q, k.to(q.dtype), v.to(q.dtype), inputs.mask, self.scale, self.softcap)
        return self.o_proj(y.transpose(1, 2).reshape(batch, count, -1))

    own_forward = forward

    def _heads(self, x: Tensor, norm: RMSNorm | PerHeadNorm | None) -> Tensor:
        """[B, T, H·head_dim] -> [B, H, T, head_dim], normed where there is a norm."""
        whole = isinstance(norm, RMSNorm) and norm.features > self.head_dim
        if norm is not None and whole:
            x = norm(x)
        heads = x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        return heads if norm is None or whole else norm(heads)

    def extra_repr(self) -> str:
        softcap = f", softcap={self.softcap:g}" if self.softcap else ""
        return (
            f"head_dim={self.head_dim}, scale={self.scale:.6g}{softcap}{'' if self.rotary else ', no RoPE'}"
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0
) -> Tensor:
    """softmax(scale·q·kᵀ)·v for q [B, H, T, D] and k, v [B, KV, S, D] where KV divides H.

    ``softcap`` c > 0: the scores are c·tanh(scale·q·kᵀ/c).
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:
        # Expanding the heads keeps the fused kernels; enable_gqa falls back to materialised scores.
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if softcap:
        return _capped(q, k, v, mask, scale, softcap)
    causal = False
    # a branch, because compilation with a symbolic number of queries takes no symbolic bool
    if mask is None and q.shape[2] > 1:
        causal = True
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """``attend`` with capped scores, which the fused kernels do not know; scores and softmax in fp32."""
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / softcap)) * softcap
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1).to(v.dtype) @ v


def attention_mask(
    starts: Tensor | None, past: int, count: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Mask for ``count`` queries behind ``past`` cached positions.

    starts: int64 [B], first real position of each left-padded row, or None without padding. A padding query
    sees itself, so that its softmax is defined. None where SDPA's own causal rule says the same.
    """
    total = past + count
    if starts is None and (past == 0 or count == 1) and (window is None or total <= window):
        return None
    key = torch.arange(total, device=device)
    query = torch.arange(past, total, device=device)[:, None]
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    if starts is None:
        return mask[None, None]
    visible = mask & (key >= starts[:, None, None])
    return (visible | (key == query))[:, None]
