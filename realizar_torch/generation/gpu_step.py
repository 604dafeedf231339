"""GpuStep: a Transformer's decode step as a fixed list of kernel launches on static buffers."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from realizar_torch.errors import CacheFullError
from realizar_torch.generation.fusable import obstacle, padding_obstacle
from realizar_torch.generation.gpu_linears import Activations, GpuLinears
from realizar_torch.generation.workspace import MAX_BATCH, Workspace
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.cache_rows import LARGEST
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.experts import MixtureOfExperts
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding
from realizar_torch.ops.cuda import problem
from realizar_torch.reference import ACTIVATION_BLOCK

# What is still to be added to the residual stream, and the factor on it.
Addition = tuple[Tensor, float] | None
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(model: Transformer, cache: KVCache) -> str | None:
    """Why the step cannot run on GPU kernels, or None if it can."""
    if model.device.type != "cuda":
        return f"the model is on {model.device}"
    if problem() is not None:
        return f"Triton cannot be used: {problem()}"
    if cache.dtype not in (*_DTYPES, *LARGEST) or model.dtype not in _DTYPES:
        return f"the model computes in {model.dtype}, with a cache of {cache.dtype}"
    if cache.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(model.device) < (8, 9):
        return "an fp8 cache takes a GPU of compute capability 8.9 or later; int8 does not"
    if cache.batch_size > MAX_BATCH:
        return f"the batch of {cache.batch_size} is larger than {MAX_BATCH}"
    if found := obstacle(model, experts=True) or padding_obstacle(model):
        return found
    for layer in model.layers:
        if layer.parallel and (layer.post_attn_norm is not None or layer.post_mlp_norm is not None):
            return "it norms what it adds in parallel"
        if isinstance(layer.mlp, MixtureOfExperts) and (layer.parallel or layer.post_mlp_norm is not None):
            return "it norms what experts give, or adds it in parallel"
    return None


class GpuStep:
    """One token of every sequence of a cache. Eager calls and graphs run the same ``launch``.

    It holds views of the cache and the workspace, the weights themselves and a table of all angles: build a
    new one when any of them may have moved, or frequencies changed. The residual stream is fp32. ``tokens``
    int64 [B] is what the next step reads; ``positions`` int32 [B] are where it goes, and rise by ``moving``,
    1 or 0 for a row that stands still.
    """

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace):
        from realizar_torch.triton_kernels.attention import attention_scratch

        config, batch = model.config, cache.batch_size
        # parts, not the model: it owns the states that own its steps
        self._config, self._layers = config, list(model.layers)
        self._table, self._final_norm, self._head = model.embed_tokens, model.norm, model.lm_head
        self._learned = model.embed_positions
        self._cache, self._workspace = cache, workspace
        device = self._device = cache.keys.device
        # launches overlap with the end of the one before, which takes Hopper's griddepcontrol
        on_gpu = device.type == "cuda"
        self._dependent = on_gpu and torch.cuda.get_device_capability(device) >= (9, 0)
        self._linears = GpuLinears(model, workspace, batch, self._dependent)
        self._view = self._linears.view
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int32, device=device)
        self.moving = torch.ones(batch, dtype=torch.int32, device=device)
        self._position = -1
        self._longest = cache.max_seq_len
        if self._learned is not None:
            self._longest = min(self._longest, config.context_length)
        # where each row is in its own text, and what has been learned for that place
        self._own = torch.zeros(batch, dtype=torch.int64, device=device)
        self._place = torch.zeros(batch, config.hidden_size, dtype=model.dtype, device=device)
        self._stream = self._view(workspace.hidden, config.hidden_size)
        self._beside = torch.zeros(batch, config.hidden_size, dtype=torch.float32, device=device)
        self._qkv = self._view(workspace.qkv, config.q_dim + 2 * config.kv_dim)
        self.logits = workspace.logits[:batch]
        self._angles = self._cos_sin(model.rope)
        self._local_angles = self._angles if model.local_rope is None else self._cos_sin(model.local_rope)
        self._growths = model.q_scale(torch.arange(cache.max_seq_len, device=device)[None])
        self._growth = torch.ones(batch, dtype=torch.float32, device=device)
        self._scratch = attention_scratch(
            batch, config.num_heads, config.num_kv_heads, config.head_dim, cache.max_seq_len, device
        )
        self._untraced_run = _untraced(GpuStep._run)

    def run(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [B] -> fp32 logits [B, V], valid until the next step; never traced by Dynamo."""
        return self._untraced_run(self, token_ids)

    def _run(self, token_ids: Tensor) -> Tensor:
        self.tokens.copy_(token_ids)
        self.place()
        self.launch()
        self.advance()
        return self.logits

    @torch.inference_mode()
    def refresh(self) -> None:
        """Takes over q, k and v biases written to since the last generation, and whether there is Dynamo."""
        self._linears.refresh()
        self._untraced_run = _untraced(GpuStep._run)

    def place(self) -> None:
        """Tells the device where the cache ends, unless it has counted to there itself."""
        if self._cache.length >= self._longest:
            raise CacheFullError(
                f"{self._cache.length} positions are cached, and no more than {self._longest} fit or were "
                "learned; load the model with a larger max_seq_len or shorten the prompt"
            )
        if self._position != self._cache.length:
            self.positions.fill_(self._cache.length)
        # not known before ``advance``: an interrupt may come between
        self._position = -1

    def advance(self) -> None:
        """Counts on the host what ``launch`` has counted on the device."""
        self._cache.advance(1)
        self._position = self._cache.length

    def launch(self) -> None:
        """The step: ``tokens`` -> ``logits``, keys and values to the cache, positions up by one; no sync."""
        self._embed()
        addition = None
        for index, layer in enumerate(self._layers):
            addition = self._block(index, layer, addition)
        x = self._norm(self._final_norm, addition, self._head)
        self._linears.linear(self._head, x, self.logits)
        if self._config.logit_scale != 1.0:
            self.logits.mul_(self._config.logit_scale)
        if cap := self._config.final_softcap:
            self.logits.div_(cap).tanh_().mul_(cap)
        self.positions.add_(self.moving)

    def _embed(self) -> None:
        """The residual stream of the tokens, and what depends on their places."""
        _look_up(self._table, self.tokens, self._stream)
        if self._learned is not None or self._growths is not None:
            torch.sub(self.positions, self._cache.starts, out=self._own)
            # a row that nobody uses may stand anywhere
            self._own.clamp_(0, self._longest - 1)
        if self._learned is not None:
            _look_up(self._learned, self._own, self._place)
            self._stream.add_(self._place)
        if self._growths is not None:
            torch.index_select(self._growths.view(-1), 0, self._own, out=self._growth)
        if self._config.embedding_scale != 1.0:
            self._stream.mul_(self._config.embedding_scale)

    def _block(self, index: int, layer: Block, addition: Addition) -> Addition:
        """One layer. ``addition``: what its first norm adds to the residual stream; returns the next one."""
        attention, mlp, scale = layer.self_attn, layer.mlp, layer.residual_scale
        x = self._norm(layer.attn_norm, addition, attention.q_proj)
        self._linears.qkv(attention, x, self._qkv)
        x = self._attend(index, attention)
        if layer.parallel:
            self._linears.linear(attention.o_proj, x, self._beside)
            norm = layer.attn_norm if layer.mlp_norm is None else layer.mlp_norm
            x = self._linears.mlp(mlp, self._norm(norm, None, mlp.up_proj))
            return self._linears.linear(mlp.down_proj, x, self._beside, residual=self._beside), scale
        addition = self._into_stream(attention.o_proj, x, layer.post_attn_norm, scale)
        if isinstance(mlp, MixtureOfExperts):
            # by its modules, which wait for nobody; the router takes the norm as it is
            self._stream.add_(mlp(self._norm(layer.mlp_norm, addition, None)), alpha=scale)
            return None
        x = self._linears.mlp(mlp, self._norm(layer.mlp_norm, addition, mlp.up_proj))
        return self._into_stream(mlp.down_proj, x, layer.post_mlp_norm, scale)

    def _norm(self, norm: RMSNorm | None, addition: Addition, reader: QuantizedLinear | None) -> Any:
        """The norm of the residual stream (or the stream itself), after adding to it, as ``reader`` takes
        it; in fp32 for no reader."""
        from realizar_torch.triton_kernels.quantize import norm_quantize, normalize

        if norm is None:
            if addition is not None:
                self._stream.add_(addition[0], alpha=addition[1])
            return self._stream if reader is None else self._linears.quantized(self._stream, reader)
        source, added = self._stream, {}
        if addition is not None:
            source, factor = addition
            added = {"residual": self._stream, "total": self._stream, "factor": factor}
        options = {
            "normalization": norm.normalization,
            "eps": norm.eps,
            "zero_centered": norm.zero_centered,
            "dependent": self._dependent,
        } | added
        if self._linears.int8 and reader is not None:
            width = reader.padded_features
            room = self._linears.room(width)
            return norm_quantize(source, norm.weight, norm.bias, width=width, out=room, **options)
        out = self._view(self._workspace.narrow, norm.features)
        return normalize(source, norm.weight, norm.bias, out=out, **options)

    def _attend(self, index: int, attention: Attention) -> Activations:
        """Rotates, writes the cache, attends; returns what the output projection takes."""
        from realizar_torch.triton_kernels.attention import decode_attention

        config, cache = self._config, self._cache
        cos, sin = self._local_angles if config.is_sliding(index) else self._angles
        norms = self._head_norms(attention)
        if self._growths is not None:
            self._qkv[:, : config.q_dim].mul_(self._growth[:, None])
        # the kernel quantizes heads of whole blocks, each vector by itself
        whole = config.head_dim % ACTIVATION_BLOCK == 0 and not self._linears.grouped
        inside = self._linears.int8 and whole and attention.o_proj.padded_features == config.q_dim
        out, quantized = decode_attention(
            self._qkv,
            cache.keys[index],
            cache.values[index],
            self.positions,
            cos if attention.rotary else None,
            sin if attention.rotary else None,
            scale=attention.scale,
            starts=cache.starts,
            window=config.window(index) or 0,
            softcap=attention.softcap,
            scratch=self._scratch,
            out=self._view(self._workspace.wide, config.q_dim),
            int8=self._linears.room(config.q_dim) if inside else None,
            dependent=self._linears.attention_overlaps,
            **cache.layer_scales(index),
            **norms,
        )
        return quantized if inside else self._linears.quantized(out, attention.o_proj)

    def _head_norms(self, attention: Attention) -> dict[str, Any]:
        """Norms of q and k that the attention kernel does; others are done here, in place."""
        from realizar_torch.triton_kernels.head_norms import norm_heads

        q_norm, k_norm = attention.q_norm, attention.k_norm
        if q_norm is None or k_norm is None:
            return {}
        if isinstance(q_norm, RMSNorm) and q_norm.features == attention.head_dim:
            kind = {"eps": q_norm.eps, "zero_centered": q_norm.zero_centered}
            return {"q_norm": q_norm.weight, "k_norm": k_norm.weight, **kind}
        column = 0
        for norm in (q_norm, k_norm):
            norm_heads(
                self._qkv,
                column,
                norm.features,
                norm.weight,
                normalization=norm.normalization,
                eps=norm.eps,
                zero_centered=getattr(norm, "zero_centered", False),
                dependent=self._dependent,
            )
            column += norm.weight.numel()
        return {}

    def _into_stream(
        self, linear: QuantizedLinear, x: Activations, norm: RMSNorm | None, scale: float
    ) -> Addition:
        """Adds ``linear(x)`` to the residual stream, or returns it, normed, for the next norm to add."""
        from realizar_torch.triton_kernels.quantize import normalize

        if norm is None and scale == 1.0:
            self._linears.linear(linear, x, self._stream, residual=self._stream)
            return None
        projected = self._linears.linear(linear, x, self._view(self._workspace.narrow, linear.out_features))
        if norm is None:
            return projected, scale
        normed = normalize(
            projected,
            norm.weight,
            norm.bias,
            normalization=norm.normalization,
            eps=norm.eps,
            zero_centered=norm.zero_centered,
            out=self._view(self._workspace.wide, linear.out_features),
            dependent=self._dependent,
        )
        return normed, scale

    def _cos_sin(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin of every position of the cache, fp32 [max_seq_len, rotary_dim/2]."""
        cos, sin = rope(torch.arange(self._cache.max_seq_len, device=self._device)[None])
        return cos[0, 0].contiguous(), sin[0, 0].contiguous()


def _look_up(table: Any, ids: Tensor, out: Tensor) -> None:
    """Rows ``ids`` int64 [B] of a packed or dense table."""
    from realizar_torch.triton_kernels.dequantize import embedding

    if isinstance(table, QuantizedEmbedding):
        embedding(ids, table.stored, table.fmt, table.embedding_dim, out=out, layout=table.layout)
    else:
        torch.index_select(table.weight, 0, ids, out=out)


def _untraced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, hidden from Dynamo where that is imported, as it is by who compiles: importing it here
    would take longer than loading a model.
    """
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
