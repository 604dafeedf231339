"""GpuStep: a Transformer's decode step as a fixed list of kernel launches on static buffers."""

import torch
from torch import Tensor

from realizar_torch.generation.fusable import obstacle
from realizar_torch.generation.workspace import MAX_BATCH, Workspace
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.nn.norm import PerHeadNorm, RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding
from realizar_torch.ops.cuda import MATVEC_ROWS, problem
from realizar_torch.reference import ACTIVATION_BLOCK

# int8 (q, scale, sums), or fp32 [B, features]
Activations = tuple[Tensor, Tensor, Tensor] | Tensor
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(model: Transformer, cache: KVCache) -> str | None:
    """Why the step cannot run on GPU kernels, or None if it can."""
    if model.device.type != "cuda":
        return f"the model is on {model.device}"
    if problem() is not None:
        return f"Triton cannot be used: {problem()}"
    if cache.keys.dtype not in _DTYPES or model.dtype not in _DTYPES:
        return f"the model computes in {model.dtype}"
    if cache.batch_size > MAX_BATCH:
        return f"the batch of {cache.batch_size} is larger than {MAX_BATCH}"
    return obstacle(model) or _other_mathematics(model)


def _other_mathematics(model: Transformer) -> str | None:
    """What the model computes beyond the step's repertoire."""
    config = model.config
    layers, norms = list(model.layers), [module for module in model.modules() if isinstance(module, RMSNorm)]
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    attentions = [layer.self_attn for layer in layers]
    facts = {
        "its logits are scaled": config.logit_scale != 1.0,
        "its logits are capped": config.final_softcap > 0,
        "its attention scores are capped": config.attention_softcap > 0,
        "it rotates a part of each head": config.rotary_dim != config.head_dim,
        "it scales cos and sin": config.rope_scaling.magnitude != 1.0,
        "it has learned positions": model.embed_positions is not None,
        "its queries grow with their position": config.temperature != 0,
        "some layers do not rotate": not all(config.arch.rotary_pattern),
        "it adds attention and MLP in parallel": any(layer.parallel for layer in layers),
        "it scales what layers add": any(layer.residual_scale != 1.0 for layer in layers),
        "it has no norm before attention or MLP": any(
            layer.attn_norm is None or layer.mlp_norm is None for layer in layers
        ),
        "it norms q over all heads or each by weights of its own": any(
            getattr(a.q_norm, "features", a.head_dim) != a.head_dim or isinstance(a.q_norm, PerHeadNorm)
            for a in attentions
        ),
        "its MLP has no gate": any(isinstance(layer.mlp, MLP) for layer in layers),
        "it uses the exact GELU": any(layer.mlp.activation == "gelu" for layer in layers),
        "it has zero-centered norms": any(norm.zero_centered for norm in norms),
        "it has LayerNorms": any(norm.normalization == "layernorm" for norm in norms),
        "its rows are no whole blocks": any(item.padded_features != item.in_features for item in linears),
    }
    return next((fact for fact, present in facts.items() if present), None)


class GpuStep:
    """One token of every sequence of a cache. Eager calls and graphs run the same ``launch``.

    It holds views of the cache and the workspace, and the weights themselves: build a new one when any of
    them may have moved. The residual stream is fp32. ``tokens`` int64 [B] is what the next step reads;
    ``positions`` int32 [B] are where it goes, and rise by ``moving``, 1 or 0 for a row that stands still.
    """

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace):
        from realizar_torch.triton_kernels.attention import attention_scratch

        config, batch = model.config, cache.batch_size
        # parts, not the model: it owns the states that own its steps
        self._config, self._layers = config, list(model.layers)
        self._table, self._final_norm, self._head = model.embed_tokens, model.norm, model.lm_head
        self._cache, self._workspace = cache, workspace
        self._batch, self._device = batch, cache.keys.device
        # launches overlap with the end of the one before, which takes Hopper's griddepcontrol
        on_gpu = self._device.type == "cuda"
        self._dependent = on_gpu and torch.cuda.get_device_capability(self._device) >= (9, 0)
        self._int8 = model.lm_head.activations == "int8"
        self._groups = [slice(i, min(i + MATVEC_ROWS, batch)) for i in range(0, batch, MATVEC_ROWS)]
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self._device)
        self.positions = torch.zeros(batch, dtype=torch.int32, device=self._device)
        self.moving = torch.ones(batch, dtype=torch.int32, device=self._device)
        self._position = -1
        self._stream = self._view(workspace.hidden, config.hidden_size)
        self._qkv = self._view(workspace.qkv, config.q_dim + 2 * config.kv_dim)
        self.logits = workspace.logits[:batch]
        self._angles = self._cos_sin(model.rope)
        self._local_angles = self._angles if model.local_rope is None else self._cos_sin(model.local_rope)
        self._scratch = attention_scratch(
            batch, config.num_heads, config.num_kv_heads, config.head_dim, cache.max_seq_len, self._device
        )
        one_launch = all(_one_launch(layer.mlp) for layer in model.layers)
        shape = (batch, config.intermediate_size)
        self._up = None if one_launch else torch.zeros(shape, device=self._device)
        # made here and not by a decorator: it imports Dynamo, which takes longer than loading a model
        self._untraced_run = torch.compiler.disable(GpuStep._run)
        self._qkv_bias = {layer: self._joined_bias(layer.self_attn) for layer in model.layers}

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
        """Takes over q, k and v biases written to since: of no other weight does the step hold a copy."""
        for layer, joined in self._qkv_bias.items():
            written = self._joined_bias(layer.self_attn)
            if joined is not None and written is not None:
                joined.copy_(written)

    def place(self) -> None:
        """Tells the device where the cache ends, unless it has counted to there itself."""
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
        from realizar_torch.triton_kernels.dequantize import embedding

        table = self._table
        embedding(
            self.tokens,
            table.stored,
            table.fmt,
            table.embedding_dim,
            out=self._stream,
            layout=table.layout,
        )
        if self._config.embedding_scale != 1.0:
            self._stream.mul_(self._config.embedding_scale)
        addition = None
        for index, layer in enumerate(self._layers):
            addition = self._block(index, layer, addition)
        self._linear(self._head, self._norm(self._final_norm, addition), self.logits)
        self.positions.add_(self.moving)

    def _block(self, index: int, layer: Block, addition: Tensor | None) -> Tensor | None:
        """One layer. ``addition``: what its first norm adds to the residual stream; returns the next one."""
        attention, mlp, config = layer.self_attn, layer.mlp, self._config
        self._project_qkv(layer, self._norm(layer.attn_norm, addition))
        x = self._attend(index, attention)
        addition = self._into_stream(attention.o_proj, x, layer.post_attn_norm)
        self._gate_up(mlp, self._norm(layer.mlp_norm, addition))
        x = self._quantized(self._view(self._workspace.wide, config.intermediate_size))
        return self._into_stream(mlp.down_proj, x, layer.post_mlp_norm)

    def _norm(self, norm: RMSNorm, addition: Tensor | None) -> Activations:
        """The norm of the residual stream, after adding to it."""
        from realizar_torch.triton_kernels.quantize import norm_quantize, normalize

        added = {} if addition is None else {"residual": self._stream, "total": self._stream}
        source = self._stream if addition is None else addition
        options = {
            "normalization": norm.normalization,
            "eps": norm.eps,
            "zero_centered": norm.zero_centered,
            "dependent": self._dependent,
        } | added
        if self._int8:
            q = self._int8_view(norm.features)
            return norm_quantize(source, norm.weight, norm.bias, width=norm.features, out=q, **options)
        out = self._view(self._workspace.narrow, norm.features)
        return normalize(source, norm.weight, norm.bias, out=out, **options)

    def _project_qkv(self, layer: Block, x: Activations) -> None:
        from realizar_torch.triton_kernels.qkv import qkv_int8

        attention = layer.self_attn
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        if isinstance(x, tuple):
            for rows in self._groups:
                qkv_int8(
                    *(part[rows] for part in x),
                    [linear.stored for linear in linears],
                    [linear.fmt for linear in linears],
                    attention.q_proj.in_features,
                    self._qkv_bias[layer],
                    layouts=[linear.layout for linear in linears],
                    out=self._qkv[rows],
                    dependent=self._dependent,
                )
            return
        column = 0
        for linear in linears:
            out = self._view(self._workspace.wide, linear.out_features)
            self._linear(linear, x, out)
            self._qkv[:, column : column + linear.out_features].copy_(out)
            column += linear.out_features

    def _attend(self, index: int, attention: Attention) -> Activations:
        """Rotates, writes the cache, attends; returns what the output projection takes."""
        from realizar_torch.triton_kernels.attention import decode_attention

        config, cache = self._config, self._cache
        cos, sin = self._local_angles if config.is_sliding(index) else self._angles
        norms: dict = {}
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = {
                "q_norm": attention.q_norm.weight,
                "k_norm": attention.k_norm.weight,
                "eps": attention.q_norm.eps,
                "zero_centered": attention.q_norm.zero_centered,
            }
        # the kernel quantizes heads of whole blocks
        inside = self._int8 and config.head_dim % ACTIVATION_BLOCK == 0
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
            int8=self._int8_view(config.q_dim) if inside else None,
            dependent=self._dependent,
            **norms,
        )
        return quantized if inside else self._quantized(out)

    def _into_stream(self, linear: QuantizedLinear, x: Activations, norm: RMSNorm | None) -> Tensor | None:
        """Adds ``linear(x)`` to the residual stream, or returns its norm, which the next norm adds."""
        from realizar_torch.triton_kernels.quantize import normalize

        if norm is None:
            self._linear(linear, x, self._stream, residual=self._stream)
            return None
        projected = self._view(self._workspace.narrow, linear.out_features)
        self._linear(linear, x, projected)
        return normalize(
            projected,
            norm.weight,
            norm.bias,
            normalization=norm.normalization,
            eps=norm.eps,
            zero_centered=norm.zero_centered,
            out=self._view(self._workspace.wide, linear.out_features),
            dependent=self._dependent,
        )

    def _gate_up(self, mlp: GatedMLP, x: Activations) -> None:
        """workspace.wide = act(gate(x)) * up(x)."""
        from realizar_torch.triton_kernels.gate_up import gate_up, gate_up_int8

        gate, up = mlp.gate_proj, mlp.up_proj
        out = self._view(self._workspace.wide, gate.out_features)
        if not _one_launch(mlp):
            assert self._up is not None
            self._linear(gate, x, out)
            self._linear(up, x, self._up)
            if mlp.activation == "silu":
                torch.ops.aten.silu_(out)
            else:
                torch.ops.aten.gelu_(out, approximate="tanh")
            out.mul_(self._up)
            return
        weights = (gate.stored, up.stored, gate.fmt, gate.in_features)
        for rows in self._groups:
            options = {
                "activation": mlp.activation,
                "out": out[rows],
                "layout": gate.layout,
                "dependent": self._dependent,
            }
            if isinstance(x, tuple):
                gate_up_int8(*(part[rows] for part in x), *weights, **options)
            else:
                gate_up(x[rows], *weights, **options)

    def _linear(
        self, linear: QuantizedLinear, x: Activations, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """out = linear(x) (+ residual, which may be ``out`` itself)."""
        from realizar_torch.triton_kernels.matvec import matvec, matvec_int8

        operands = (linear.stored, linear.fmt, linear.in_features, linear.bias)
        for rows in self._groups:
            options = {
                "residual": None if residual is None else residual[rows],
                "out": out[rows],
                "layout": linear.layout,
                "dependent": self._dependent,
            }
            if isinstance(x, tuple):
                matvec_int8(*(part[rows] for part in x), *operands, **options)
            else:
                matvec(x[rows], *operands, **options)

    def _quantized(self, x: Tensor) -> Activations:
        """``x`` [B, features] as the linears take it."""
        from realizar_torch.triton_kernels.quantize import quantize_activations

        if not self._int8:
            return x
        out = self._int8_view(x.shape[1])
        return quantize_activations(x, x.shape[1], out, dependent=self._dependent)

    def _view(self, buffer: Tensor, width: int) -> Tensor:
        """The beginning of a workspace buffer as contiguous [B, width]."""
        return buffer.view(-1)[: self._batch * width].view(self._batch, width)

    def _int8_view(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        work = self._workspace
        blocks = width // ACTIVATION_BLOCK
        return (
            self._view(work.quants, width),
            self._view(work.scales, blocks),
            self._view(work.sums, 2 * blocks),
        )

    def _cos_sin(self, rope: RotaryEmbedding) -> tuple[Tensor, Tensor]:
        """cos and sin of every position of the cache, fp32 [max_seq_len, head_dim/2]."""
        cos, sin = rope(torch.arange(self._cache.max_seq_len, device=self._device)[None])
        return cos[0, 0].contiguous(), sin[0, 0].contiguous()

    def _joined_bias(self, attention: Attention) -> Tensor | None:
        """The biases of q, k and v in one vector, zeros where one has none; None where none has."""
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        if all(linear.bias is None for linear in linears):
            return None
        parts = [
            torch.zeros(linear.out_features, device=self._device)
            if linear.bias is None
            else linear.bias.float()
            for linear in linears
        ]
        return torch.cat(parts)


def _one_launch(mlp: GatedMLP) -> bool:
    """True if one kernel can compute gate and up: one format, one layout, no bias."""
    gate, up = mlp.gate_proj, mlp.up_proj
    return (gate.fmt, gate.layout) == (up.fmt, up.layout) and gate.bias is None and up.bias is None
