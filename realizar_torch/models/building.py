"""ModelBuilder: the modules of a model from the tensors of its file."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from realizar_torch import ops
from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.errors import MissingTensorsError
from realizar_torch.models.arch import QUERY_KEY_VALUE
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.tensors import (
    LONG_DIVISORS,
    MODEL_TENSORS,
    ROPE_DIVISORS,
    SHORT_DIVISORS,
    has_experts,
    has_mlp_norm,
    has_norm_bias,
    has_qk_norm,
    layer_names,
)
from realizar_torch.models.transformer import Block
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.experts import (
    DenseExperts,
    GatedExperts,
    MixtureOfExperts,
    QuantizedExperts,
    Scores,
)
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP
from realizar_torch.nn.norm import LayerNorm, PerHeadNorm, RMSNorm


class ModelBuilder:
    """Makes modules of one file's tensors, which ``models.tensors`` has checked.

    Weights on the CPU stay views of the file's mapping, also those that are slices of a tensor; q and k whose
    rows are put into another order are copies. dtype: of activations, norms, biases and dense weights; None:
    each as in the file. activations: "float" or "int8", for every packed linear.
    """

    def __init__(
        self,
        file: ModelSource,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype | None,
        activations: str,
    ):
        self.file, self.config = file, config
        self.device, self.dtype, self.activations = device, dtype, activations

    def floats(self, name: str) -> Tensor:
        return self.file.read(name).to(device=self.device, dtype=self.dtype, copy=True)

    def norm(self, name: str) -> RMSNorm:
        """A norm of the residual stream."""
        size, eps, kind = self.config.hidden_size, self.config.norm_eps, self.config.arch.normalization
        norm = RMSNorm(size, eps, device="meta")
        if kind == "layernorm":
            norm = LayerNorm(size, eps, has_norm_bias(self.config), device="meta")
        for key, _ in list(norm.named_parameters()):
            setattr(norm, key, nn.Parameter(self.floats(f"{name}.{key}"), requires_grad=False))
        return norm

    def linear(self, name: str, rows: slice | Tensor = slice(None)) -> nn.Module:
        """The linear of a tensor, or of the given rows of it: a slice shares the file's memory."""
        info = self.file.tensors[f"{name}.weight"]
        bias = self.floats(f"{name}.bias")[rows] if f"{name}.bias" in self.file.tensors else None
        return self._linear(info, self._weight(info, rows), bias)

    def _weight(self, info: TensorInfo, rows: slice | Tensor = slice(None)) -> Tensor:
        """Rows of a tensor, packed or of ``dtype``, on the device; what was copied is let go in the file."""
        stored = self.file.read(info.name)
        dtype = stored.dtype if info.fmt.packed else self.dtype
        weight = stored[rows].to(device=self.device, dtype=dtype)
        if weight.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
            self.file.release(info.name)
        return weight

    def _linear(self, info: TensorInfo, weight: Tensor, bias: Tensor | None) -> nn.Module:
        in_features = info.shape[1]
        if info.fmt.packed:
            linear = QuantizedLinear.from_blocks(weight, in_features, info.fmt.name, bias)
            linear.activations = self.activations
            return linear.requires_grad_(False)
        dense = nn.Linear(
            in_features, weight.shape[0], bias=bias is not None, device="meta", dtype=self.dtype
        )
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            dense.bias = nn.Parameter(bias)
        return dense.requires_grad_(False)

    def embedding(self, name: str) -> nn.Module:
        info = self.file.tensors[f"{name}.weight"]
        weight = self._weight(info)
        if info.fmt.packed:
            return QuantizedEmbedding.from_blocks(weight, info.shape[1], info.fmt.name, dtype=self.dtype)
        dense = nn.Embedding(info.shape[0], info.shape[1], device="meta", dtype=self.dtype)
        dense.weight = nn.Parameter(weight, requires_grad=False)
        return dense

    def head(self, embedding: Any) -> nn.Module:
        """The output head: its own tensor, or the embedding's weight shared."""
        name = MODEL_TENSORS["lm_head"]
        if f"{name}.weight" in self.file.tensors:
            return self.linear(name)
        bias = self.floats(f"{name}.bias") if f"{name}.bias" in self.file.tensors else None
        info = self.file.tensors[f"{MODEL_TENSORS['embed_tokens']}.weight"]
        head = self._linear(info, embedding.weight.detach(), bias)
        head.weight = embedding.weight
        return head

    def positions(self) -> nn.Module | None:
        """The table of learned positions, where the architecture has one."""
        learned = self.config.arch.learned_positions
        return self.embedding(MODEL_TENSORS["embed_positions"]) if learned else None

    def block(self, layer: int) -> Block:
        config, arch, names = self.config, self.config.arch, layer_names(layer, self.file.tensors)
        mlp_norm = has_mlp_norm(config, layer, self.file.tensors)
        return Block(
            self.norm(names["attn_norm"]) if arch.pre_norms else None,
            self._attention(layer, names),
            self.norm(names["mlp_norm"]) if mlp_norm else None,
            self._experts(names) if has_experts(config, layer, self.file.tensors) else self._mlp(names),
            self.norm(names["post_attn_norm"]) if arch.post_norms else None,
            self.norm(names["post_mlp_norm"]) if arch.post_norms else None,
            parallel=config.parallel_residual or (arch.pre_norms and not mlp_norm),
            residual_scale=config.residual_scale,
        )

    def rope_divisors(self, max_seq_len: int) -> tuple[float, ...] | None:
        """Divisors of the rotary frequencies that the file holds as a tensor, or None.

        LongRoPE has two sets: a model that shall see more than ``original_length`` positions uses the long
        one for all of them, as in llama.cpp; cached keys could not follow a later change.
        """
        long = max_seq_len > self.config.rope_scaling.original_length
        for name in (ROPE_DIVISORS, LONG_DIVISORS if long else SHORT_DIVISORS):
            if name in self.file.tensors:
                divisors = self.file.read(name).double()
                if not bool((divisors.isfinite() & (divisors > 0)).all()):
                    raise MissingTensorsError(
                        f"{shown_path(self.file.path)}: {name} holds values that are not positive and finite"
                    )
                return tuple(divisors.tolist())
        return None

    def _attention(self, layer: int, names: Mapping[str, str]) -> Attention:
        config = self.config
        q_proj, k_proj, v_proj = self._query_key_value(names)
        normed = has_qk_norm(config, layer, self.file.tensors)
        return Attention(
            q_proj,
            k_proj,
            v_proj,
            self.linear(names["self_attn.o_proj"]),
            head_dim=config.head_dim,
            scale=config.attention_scale,
            q_norm=self._qk_norm(names["self_attn.q_norm"]) if normed else None,
            k_norm=self._qk_norm(names["self_attn.k_norm"]) if normed else None,
            rotary=config.is_rotary(layer),
            softcap=config.attention_softcap,
        )

    def _query_key_value(self, names: Mapping[str, str]) -> list[nn.Module]:
        """q, k and v from a tensor each or from one."""
        config = self.config
        fused = names.get("self_attn.qkv_proj")
        start, linears = 0, []
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        for module, count in zip(QUERY_KEY_VALUE, heads, strict=True):
            rows: slice | Tensor = slice(start, start + count * config.head_dim)
            if config.arch.interleaved_qk and module != "self_attn.v_proj":
                rows = start + _half_split_order(count, config.head_dim, config.rotary_dim)
            linears.append(self.linear(fused or names[module], rows))
            start += count * config.head_dim if fused else 0
        return linears

    def _qk_norm(self, name: str) -> RMSNorm | PerHeadNorm:
        config, weight = self.config, self.floats(f"{name}.weight")
        norm: RMSNorm | PerHeadNorm
        if weight.ndim == 1:
            norm = RMSNorm(weight.numel(), config.norm_eps, device="meta")
        else:
            heads, size = weight.shape
            kind = config.arch.normalization
            norm = PerHeadNorm(
                heads, size, config.norm_eps, normalization=kind, device="meta", dtype=self.dtype
            )
            if config.arch.interleaved_qk:
                weight = weight[:, _half_split_order(1, size, config.rotary_dim)]
        norm.weight = nn.Parameter(weight, requires_grad=False)
        return norm

    def _mlp(self, names: Mapping[str, str]) -> GatedMLP | MLP:
        arch, inner = self.config.arch, self.config.intermediate_size
        up, down_proj = names["mlp.up_proj"], self.linear(names["mlp.down_proj"])
        if not arch.gated:
            return MLP(self.linear(up), down_proj, activation=arch.activation)
        if arch.fused_gate_up:
            gate_proj, up_proj = self.linear(up, slice(0, inner)), self.linear(up, slice(inner, None))
        else:
            gate_proj, up_proj = self.linear(names["mlp.gate_proj"]), self.linear(up)
        return GatedMLP(gate_proj, up_proj, down_proj, activation=arch.activation)

    def _experts(self, names: Mapping[str, str]) -> MixtureOfExperts:
        experts, activation = self.config.experts, self.config.arch.activation
        assert experts is not None
        parts = ("gate_proj", "up_proj", "down_proj")
        shared_expert = shared_gate = None
        if experts.shared_size:
            linears = (self.linear(names[f"mlp.shared_expert.{part}"]) for part in parts)
            shared_expert = GatedMLP(*linears, activation=activation)
            shared_gate = self._scores(names["mlp.shared_gate"])
        return MixtureOfExperts(
            self._scores(names["mlp.router"]),
            GatedExperts(
                *(self._matrices(names[f"mlp.experts.{part}"]) for part in parts), activation=activation
            ),
            shared_expert,
            shared_gate,
            used=experts.used,
            normalized=experts.normalized,
        )

    def _matrices(self, name: str) -> QuantizedExperts | DenseExperts:
        info = self.file.tensors[f"{name}.weight"]
        weight = self._weight(info)
        if info.fmt.packed:
            return QuantizedExperts(weight, info.shape[2], info.fmt.name, activations=self.activations)
        return DenseExperts(weight)

    def _scores(self, name: str) -> Scores:
        """In float32, also where the file has it packed, as some old ones do."""
        info = self.file.tensors[f"{name}.weight"]
        stored = self.file.read(info.name)
        if info.fmt.packed:
            stored = ops.dequantize(stored, info.fmt.name, info.shape[-1])
        weight = stored.to(device=self.device, dtype=torch.float32, copy=True)
        return Scores(weight.view(-1, info.shape[-1]))


def _half_split_order(heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Row order that undoes the interleaving: GGUF row 2i+h of a head was row h·(rotary_dim/2)+i."""
    order = torch.arange(heads * head_dim, device="cpu").view(heads, head_dim)
    order[:, :rotary_dim] = (
        order[:, :rotary_dim].view(heads, -1, 2).transpose(1, 2).reshape(heads, rotary_dim)
    )
    return order.reshape(-1)
