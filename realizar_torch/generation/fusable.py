"""Which models the fused decode steps may replace: those that compute exactly what the step would."""

import torch
from torch import nn
from torch.nn.modules import module as hooks

from realizar_torch.models.transformer import Block, Transformer
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
from realizar_torch.nn.projection import has_own_forward
from realizar_torch.nn.rope import RotaryEmbedding

# Exactly these classes: a subclass may compute something else.
_KNOWN_MODULES = {
    nn.ModuleList,
    Block,
    Attention,
    GatedMLP,
    MLP,
    QuantizedLinear,
    QuantizedEmbedding,
    RMSNorm,
    LayerNorm,
    PerHeadNorm,
    RotaryEmbedding,
}
_DENSE_MODULES = {nn.Linear, nn.Embedding}
_DENSE_EXPERTS = {DenseExperts}
_EXPERT_MODULES = {MixtureOfExperts, GatedExperts, QuantizedExperts, Scores}


def obstacle(model: Transformer, *, dense: bool = False, experts: bool = False) -> str | None:
    """What in the model a fused step does not know, or None.

    Fused steps know packed weights, one dtype and device, and modules that nobody has replaced, wrapped,
    subclassed or hooked, of classes whose forward is their own, in a model whose logits are Transformer's;
    learned positions may be dense. ``dense``: this step also knows plain ``nn.Linear`` and ``nn.Embedding``,
    and linears that differ in numerics. ``experts``: it knows mixtures of experts, which are packed unless
    ``dense``.
    """
    known = _KNOWN_MODULES | (_DENSE_MODULES if dense else set()) | (_EXPERT_MODULES if experts else set())
    known |= _DENSE_EXPERTS if dense and experts else set()
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "a forward hook is registered for all modules"
    device, dtype = model.device, model.dtype
    numerics: set[str] = set()
    kinds: set[type[nn.Module]] = set()
    for module in model.modules():
        found = None
        kinds.add(type(module))
        learned = module is model.embed_positions and type(module) in _DENSE_MODULES
        if module is not model and type(module) not in known and not learned:
            found = f"is a {type(module).__name__}"
        if found := found or _obstacle_in(module, device, dtype):
            # names cost more than the rest of the walk
            name = next(name for name, other in model.named_modules() if other is module)
            return f"{name or 'the model'} {found}"
        if type(module) is QuantizedLinear:
            numerics.add(module.activations)
    for kind in kinds - {nn.ModuleList}:
        if not has_own_forward(kind):
            return f"{kind.__name__}.forward was replaced or overridden"
    # a subclass's, or the model's own
    if getattr(model.logits, "__func__", None) is not Transformer.logits:
        return f"{type(model).__name__}.logits was replaced or overridden"
    if len(numerics) > 1 and not dense:
        return f"the linears differ in activations: {', '.join(sorted(numerics))}"
    return None


def padding_obstacle(model: Transformer) -> str | None:
    """What keeps linears that read the same activations from being padded alike, or None."""
    for name, layer in model.layers.named_children():
        attention, mlp = layer.self_attn, layer.mlp
        mlps = mlp.children() if isinstance(mlp, MixtureOfExperts) else [mlp]
        for readers in ((attention.q_proj, attention.k_proj, attention.v_proj), *map(_expanding, mlps)):
            if len({linear.padded_features for linear in readers}) > 1:
                return f"rows of layer {name} that read the same values are padded to several lengths"
    return None


def _expanding(mlp: nn.Module) -> tuple[QuantizedLinear, ...]:
    if isinstance(mlp, GatedMLP | GatedExperts):
        return mlp.gate_proj, mlp.up_proj
    return (mlp.up_proj,) if isinstance(mlp, MLP) else ()


def _obstacle_in(module: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with a module itself, for a model on ``device`` that computes in ``dtype``.

    It looks into the module's own dictionaries: every request asks this of every module.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a forward hook"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if isinstance(module, Attention) and not _alike(module.q_norm, module.k_norm):
        return "norms q and k in different ways"
    if isinstance(module, MixtureOfExperts) and not _routes_exist(module):
        return "has other experts than its router names"
    if isinstance(module, QuantizedEmbedding) and module.dtype != dtype:
        return f"gives {module.dtype}, the model computes in {dtype}"
    for owned in (module._parameters, module._buffers):
        for key, tensor in owned.items():
            if tensor is None:
                continue
            if tensor.device != device:
                return f"has its {key} on {tensor.device}, the model is on {device}"
            if not tensor.is_contiguous():
                return f"has a {key} with gaps (strides {tuple(tensor.stride())})"
            if tensor.dtype in (torch.uint8, dtype) or isinstance(module, Scores):
                continue
            if owned is module._parameters and tensor.is_floating_point():
                return f"has a {tensor.dtype} {key}, the model computes in {dtype}"
            if tensor.dtype != torch.float32:
                return f"has a {tensor.dtype} {key}"
    return None


def _routes_exist(mixture: MixtureOfExperts) -> bool:
    """Whether every expert that the router can choose has its matrices, and as many are used as there are."""
    experts = mixture.experts
    parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
    counts = {len(part.stored if isinstance(part, QuantizedExperts) else part.weight) for part in parts}
    return counts == {len(mixture.router.weight)} and 0 < mixture.used <= max(counts)


def _alike(q_norm: RMSNorm | PerHeadNorm | None, k_norm: RMSNorm | PerHeadNorm | None) -> bool:
    """Whether one kernel can norm both: all heads or each one, with the same constants, or none."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    kinds = [
        (type(norm), norm.eps, norm.normalization, getattr(norm, "zero_centered", False))
        for norm in (q_norm, k_norm)
    ]
    return kinds[0] == kinds[1]
