"""From a GGUF file to a Transformer: every tensor is bound by name, or nothing is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from realizar_torch.checkpoint.gguf import GGUFFile, TensorInfo
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.errors import MissingTensorsError
from realizar_torch.models.arch import LAYER_TENSORS, MODEL_TENSORS, ROPE_DIVISORS
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm


def expected_shapes(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Tensor name -> shape (rows first): those the architecture requires, and those it may have."""
    hidden, inner, arch = config.hidden_size, config.intermediate_size, config.arch
    shapes = {
        "attn_norm": (hidden,),
        "self_attn.q_proj": (config.q_dim, hidden),
        "self_attn.k_proj": (config.kv_dim, hidden),
        "self_attn.v_proj": (config.kv_dim, hidden),
        "self_attn.o_proj": (hidden, config.q_dim),
        "mlp_norm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if arch.qk_norm:
        shapes |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    if arch.post_norms:
        shapes |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}

    required = {
        f"{MODEL_TENSORS['embed_tokens']}.weight": (config.vocab_size, hidden),
        f"{MODEL_TENSORS['norm']}.weight": (hidden,),
    }
    optional = {
        f"{MODEL_TENSORS['lm_head']}.weight": (config.vocab_size, hidden),
        ROPE_DIVISORS: (config.head_dim // 2,),
    }
    for layer in range(config.num_layers):
        for module, shape in shapes.items():
            name = f"blk.{layer}.{LAYER_TENSORS[module]}"
            required[f"{name}.weight"] = shape
            if len(shape) == 2:
                optional[f"{name}.bias"] = shape[:1]
    return required, optional


def tensor_problems(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> list[str]:
    """One line for every missing, unexpected or misshapen tensor; empty if the model is complete."""
    if config.num_layers > len(tensors):
        return [f"block_count is {config.num_layers}, but the file has only {len(tensors)} tensors"]
    required, optional = expected_shapes(config)
    known = required | optional
    problems = [f"missing {name} {list(shape)}" for name, shape in required.items() if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in known]
    problems += [
        f"{name} has shape {list(info.shape)}, expected {list(known[name])}"
        for name, info in tensors.items()
        if name in known and tuple(info.shape) != known[name]
    ]
    problems += [
        f"{name} is {info.fmt.name}, but norms and biases must be plain floats"
        for name, info in tensors.items()
        if name in known and len(known[name]) == 1 and info.fmt.packed
    ]
    return problems


def check_tensors(tensors: Mapping[str, TensorInfo], config: ModelConfig, source: str) -> None:
    """MissingTensorsError names the first problems and counts the rest."""
    problems = tensor_problems(tensors, config)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise MissingTensorsError(f"{source} is no complete {config.arch.name} model: {shown}")


class _Builder:
    """Makes modules from the tensors of one file."""

    def __init__(
        self, file: GGUFFile, config: ModelConfig, device: torch.device, dtype: torch.dtype, activations: str
    ):
        self.file, self.config = file, config
        self.device, self.dtype, self.activations = device, dtype, activations

    def floats(self, name: str) -> Tensor:
        return self.file.read(name).to(device=self.device, dtype=self.dtype, copy=True)

    def norm(self, name: str) -> RMSNorm:
        weight = self.floats(f"{name}.weight")
        norm = RMSNorm(weight.numel(), self.config.norm_eps, device="meta", dtype=self.dtype)
        norm.weight = nn.Parameter(weight, requires_grad=False)
        return norm

    def linear(self, name: str, *, unpermute_heads: int = 0) -> nn.Module:
        info = self.file.tensors[f"{name}.weight"]
        weight = self.file.read(f"{name}.weight")
        bias = self.floats(f"{name}.bias") if f"{name}.bias" in self.file.tensors else None
        if unpermute_heads:
            order = _half_split_order(info.shape[0], unpermute_heads)
            weight, bias = weight[order], None if bias is None else bias[order]
        return self._linear(info, weight, bias)

    def _linear(self, info: TensorInfo, weight: Tensor, bias: Tensor | None) -> nn.Module:
        in_features = info.shape[1]
        if info.fmt.packed:
            linear = QuantizedLinear.from_blocks(weight.to(self.device), in_features, info.fmt.name, bias)
            linear.activations = self.activations
            return linear.requires_grad_(False)
        dense = nn.Linear(in_features, info.shape[0], bias=bias is not None, device="meta", dtype=self.dtype)
        dense.weight = nn.Parameter(weight.to(device=self.device, dtype=self.dtype), requires_grad=False)
        if bias is not None:
            dense.bias = nn.Parameter(bias)
        return dense.requires_grad_(False)

    def embedding(self, name: str) -> nn.Module:
        info = self.file.tensors[f"{name}.weight"]
        weight = self.file.read(f"{name}.weight").to(self.device)
        if info.fmt.packed:
            return QuantizedEmbedding.from_blocks(weight, info.shape[1], info.fmt.name, dtype=self.dtype)
        dense = nn.Embedding(info.shape[0], info.shape[1], device="meta", dtype=self.dtype)
        dense.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        return dense

    def head(self, embedding: Any) -> nn.Module:
        """The output head: its own tensor, or the embedding's weight shared."""
        name = MODEL_TENSORS["lm_head"]
        if f"{name}.weight" in self.file.tensors:
            return self.linear(name)
        info = self.file.tensors[f"{MODEL_TENSORS['embed_tokens']}.weight"]
        head = self._linear(info, embedding.weight.detach(), None)
        head.weight = embedding.weight
        return head

    def block(self, layer: int) -> Block:
        config, arch = self.config, self.config.arch
        name = {module: f"blk.{layer}.{tensor}" for module, tensor in LAYER_TENSORS.items()}
        attention = Attention(
            self.linear(name["self_attn.q_proj"], unpermute_heads=config.num_heads * arch.interleaved_qk),
            self.linear(name["self_attn.k_proj"], unpermute_heads=config.num_kv_heads * arch.interleaved_qk),
            self.linear(name["self_attn.v_proj"]),
            self.linear(name["self_attn.o_proj"]),
            head_dim=config.head_dim,
            scale=config.attention_scale,
            q_norm=self.norm(name["self_attn.q_norm"]) if arch.qk_norm else None,
            k_norm=self.norm(name["self_attn.k_norm"]) if arch.qk_norm else None,
        )
        mlp = GatedMLP(
            self.linear(name["mlp.gate_proj"]),
            self.linear(name["mlp.up_proj"]),
            self.linear(name["mlp.down_proj"]),
            activation=arch.activation,
        )
        return Block(
            self.norm(name["attn_norm"]),
            attention,
            self.norm(name["mlp_norm"]),
            mlp,
            self.norm(name["post_attn_norm"]) if arch.post_norms else None,
            self.norm(name["post_mlp_norm"]) if arch.post_norms else None,
        )


def _half_split_order(rows: int, heads: int) -> Tensor:
    """Row order that undoes the interleaving: GGUF row 2i+h of a head was row h·(D/2)+i."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(rows)


def _rope_divisors(file: GGUFFile, source: str) -> tuple[float, ...] | None:
    if ROPE_DIVISORS not in file.tensors:
        return None
    divisors = file.read(ROPE_DIVISORS).double()
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        raise MissingTensorsError(f"{source}: {ROPE_DIVISORS} holds values that are not positive and finite")
    return tuple(divisors.tolist())


def load_transformer(
    file: GGUFFile,
    *,
    device: torch.device,
    dtype: torch.dtype,
    activations: str,
    model_class: type[Transformer] = Transformer,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Builds the model of an open file. Weights on the CPU stay views of the private file mapping.

    dtype: of activations, norms and biases. activations: "float" or "int8", for every packed linear.
    """
    source = shown_path(file.path)
    config = ModelConfig.from_gguf(file.metadata, source)
    check_tensors(file.tensors, config, source)

    build = _Builder(file, config, device, dtype, activations)
    embedding = build.embedding(MODEL_TENSORS["embed_tokens"])
    layers = []
    for layer in range(config.num_layers):
        layers.append(build.block(layer))
        if progress is not None:
            progress(layer + 1, config.num_layers)
    norm, head = build.norm(MODEL_TENSORS["norm"]), build.head(embedding)
    model = model_class(config, embedding, layers, norm, head, _rope_divisors(file, source))
    return model.to(device).eval()
