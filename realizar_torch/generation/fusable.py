"""Which models the fused decode steps may replace: those that compute exactly what the step would."""

import torch
from torch import nn
from torch.nn.modules import module as hooks

from realizar_torch.formats import get_packed_format
from realizar_torch.models.transformer import Block, Transformer
from realizar_torch.nn.attention import Attention
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm
from realizar_torch.nn.rope import RotaryEmbedding

# Exactly these classes: a subclass may compute something else.
_KNOWN_MODULES = {
    nn.ModuleList,
    Block,
    Attention,
    GatedMLP,
    QuantizedLinear,
    QuantizedEmbedding,
    RMSNorm,
    RotaryEmbedding,
}
_DENSE_MODULES = {nn.Linear, nn.Embedding}


def obstacle(model: Transformer, *, dense: bool = False) -> str | None:
    """What in the model a fused step does not know, or None.

    Fused steps know packed weights whose rows are whole blocks, one dtype and device, one norm epsilon, and
    modules that nobody has replaced, wrapped, subclassed or hooked. ``dense``: this step also knows plain
    ``nn.Linear`` and ``nn.Embedding``, and linears that differ in numerics.
    """
    known = _KNOWN_MODULES | (_DENSE_MODULES if dense else set())
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "a forward hook is registered for all modules"
    for name, module in model.named_modules():
        if module is not model and type(module) not in known:
            return f"{name} is a {type(module).__name__}"
        if found := _obstacle_in(module, model):
            return f"{name or 'the model'} {found}"
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    numerics = {linear.activations for linear in linears}
    if len(numerics) > 1 and not dense:
        return f"the linears differ in activations: {', '.join(sorted(numerics))}"
    if found := _other_mathematics(model):
        return found
    if len({module.eps for module in model.modules() if isinstance(module, RMSNorm)}) > 1:
        return "the norms differ in eps"
    return None


def _other_mathematics(model: Transformer) -> str | None:
    """What the model as a whole computes beyond the steps' repertoire."""
    config = model.config
    facts = {
        "its logits are scaled": config.logit_scale != 1.0,
        "its logits are capped": config.final_softcap > 0,
        "its attention scores are capped": config.attention_softcap > 0,
        "it rotates a part of each head": config.rotary_dim != config.head_dim,
        "it scales cos and sin": config.rope_scaling.magnitude != 1.0,
        "it has learned positions": model.embed_positions is not None,
        "its queries grow with their position": config.temperature != 0,
        "some layers do not rotate": not all(config.arch.rotary_pattern),
    }
    return next((fact for fact, present in facts.items() if present), None)


def _obstacle_in(module: nn.Module, model: Transformer) -> str | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a forward hook"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if isinstance(module, Block) and (module.parallel or module.residual_scale != 1.0):
        return "adds attention and MLP in parallel or scaled"
    if isinstance(module, Block) and (module.attn_norm is None or module.mlp_norm is None):
        return "has no norm before attention or MLP"
    if (
        isinstance(module, Attention)
        and getattr(module.q_norm, "features", module.head_dim) != module.head_dim
    ):
        return "norms q over all heads"
    if isinstance(module, GatedMLP) and module.activation == "gelu":
        return "uses the exact GELU"
    if isinstance(module, RMSNorm) and module.zero_centered:
        return "is zero-centered"
    if isinstance(module, QuantizedEmbedding) and module.dtype != model.dtype:
        return f"gives {module.dtype}, the model computes in {model.dtype}"
    if isinstance(module, QuantizedLinear) and module.padded_features != module.in_features:
        size = get_packed_format(module.fmt).block_size
        return f"has {module.in_features} columns, no multiple of {size} ({module.fmt})"
    for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.device != model.device:
            return f"has its {key} on {tensor.device}, the model is on {model.device}"
        if not tensor.is_contiguous():
            return f"has a {key} with gaps (strides {tuple(tensor.stride())})"
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dtype != model.dtype:
            return f"has a {tensor.dtype} {key}, the model computes in {model.dtype}"
        if tensor.dtype not in (torch.uint8, torch.float32, model.dtype):
            return f"has a {tensor.dtype} {key}"
    return None
