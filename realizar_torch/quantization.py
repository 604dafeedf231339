"""quantize_model: the dense weights of any nn.Module, encoded in place; a report of what became of each."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.format_plan import check_patterns, choose_formats, several_patterns
from realizar_torch.formats import BlockFormat
from realizar_torch.nn.embedding import QuantizedEmbedding, ScaledEmbedding
from realizar_torch.nn.experts import DenseExperts, QuantizedExperts
from realizar_torch.nn.layout import PackedModule
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.weight_readers import leave_fast_paths, weight_readers
from realizar_torch.ops.checks import ACTIVATIONS, FLOATS, check_callable, check_choice

# the head by itself and in wrappers
DEFAULT_EXCLUDE = ("lm_head", "*.lm_head")
_KINDS = (nn.Linear, nn.Embedding, DenseExperts)
# linears of transformers, which need not be there: one of weight [in, out], one of nn.Linear's numbers
_CONV1D = "transformers.pytorch_utils.Conv1D"
_FALCON_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class ModuleReport:
    """What became of one weight. names: the modules that share it. fmt: its format now, None where it stayed
    dense, and then reason says why. Bytes are those of the weight, without the bias."""

    names: tuple[str, ...]
    fmt: str | None
    reason: str | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport:
    """modules: one entry for each weight of a linear or embedding, in the order of the model."""

    modules: tuple[ModuleReport, ...]

    @property
    def bytes_before(self) -> int:
        return sum(module.bytes_before for module in self.modules)

    @property
    def bytes_after(self) -> int:
        return sum(module.bytes_after for module in self.modules)

    @property
    def skipped(self) -> tuple[ModuleReport, ...]:
        """The entries that stayed dense."""
        return tuple(module for module in self.modules if module.fmt is None)

    def __str__(self) -> str:
        lines = []
        for entry in self.modules:
            became = entry.fmt or f"dense, {entry.reason}"
            lines.append(
                f"{', '.join(entry.names)}: {entry.bytes_before} -> {entry.bytes_after} bytes ({became})"
            )
        return "\n".join([*lines, f"all: {self.bytes_before} -> {self.bytes_after} bytes"])


def quantize_model(
    model: nn.Module,
    fmt_or_plan: str | Mapping[str, str],
    *,
    exclude: str | Iterable[str] = DEFAULT_EXCLUDE,
    activations: str = "float",
    progress: Callable[[int, int], None] | None = None,
) -> QuantizationReport:
    """Replaces ``nn.Linear``, ``nn.Embedding``, what transformers has like them (``Conv1D``, Falcon's linear,
    Gemma's scaled embedding) and the dense experts of rt.load's models by packed modules, in place.

    fmt_or_plan: a format for all, or a dict of patterns (fnmatch, on full module names) and formats, of which
    the first that matches decides. exclude: a pattern of modules that stay dense, or several, () for none;
    where not given, an ``lm_head`` at any depth. activations: of the new linears. progress: called with
    (weights done, weights in all). Rows that are no whole blocks are padded, as ``QuantizedLinear`` does.

    Modules that share a weight go on sharing it, and stay dense together. A weight stays dense, and the
    report says so, if it is excluded or in no pattern, would not become smaller, is of a subclass (which may
    compute something else), has hooks or parametrizations, or no values (meta device), or if anything else in
    the model holds it as a parameter of its own. It also stays dense if the source of a class in the model
    reads it, as T5's ``x.to(self.wo.weight.dtype)``, unless the pattern that decides ends in the module's own
    name, as "*.wo" does. torch's encoder layers, which read weights for speed alone, are kept from it.
    Weights are encoded one after the other: memory grows by one packed weight and the encoder's slices.

    FormatError, before anything is changed: an unknown format, a pattern that matches no such module, one
    weight in two formats, nothing to replace. FormatError for a weight with values that no block can hold
    comes when it is met: the weights before it are packed then.
    """
    check_choice("activations", activations, ACTIVATIONS)
    check_callable("progress", progress)
    groups = _weights(model)
    names = [name for group in groups for name in group.names]
    if not names:
        raise FormatError(_nothing_to_quantize(model))
    exclude = several_patterns("exclude", exclude)
    if exclude != DEFAULT_EXCLUDE:
        check_patterns(exclude, names)
    plan = {"*": fmt_or_plan} if isinstance(fmt_or_plan, str) else fmt_or_plan
    formats = choose_formats(plan, names)
    readers = {n: reader for n, reader in weight_readers(model).items() if not _spelled(n, plan)}
    holders = _other_holders(model, names)
    work = deque((group, *_decide(group, formats, exclude, readers, holders)) for group in groups)
    count = len(groups)
    # work holds the groups alone, and each only until it is done: so dense weights go one by one
    del groups
    reports: list[ModuleReport] = []
    try:
        while work:
            reports.append(_quantize_one(model, *work.popleft(), activations))
            if progress is not None:
                progress(len(reports), count)
    finally:
        leave_fast_paths(model)
    return QuantizationReport(tuple(reports))


def _nothing_to_quantize(model: nn.Module) -> str:
    """Why a model without linears or embeddings inside has none."""
    kind = type(model).__name__
    if isinstance(model, nn.Linear | nn.Embedding) or _is_conv1d(model):
        return (
            f"the model is one {kind}, and modules are replaced inside a model: use "
            "QuantizedLinear.from_linear, QuantizedEmbedding.from_embedding, or put it into an nn.Sequential"
        )
    if any(isinstance(module, PackedModule) for module in model.modules()):
        return f"the {kind} is quantized already: all its linears and embeddings are packed"
    return "the model has no nn.Linear, nn.Embedding or Conv1D to quantize"


class _Scaled(nn.Embedding):
    """What Gemma's embeddings compute: each model of transformers has its own copy of this class."""

    embed_scale: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


def row_scale(module: nn.Module) -> float | None:
    """The number by which a scaled embedding of transformers multiplies its rows, its ``scalar_embed_scale``.

    None for every other module, embeddings that do more (T5Gemma2's) and subclasses of scaled ones.
    """
    scale, kind = getattr(module, "scalar_embed_scale", None), type(module)
    if scale is None or kind.__bases__ != (nn.Embedding,):
        return None
    code, copied = getattr(kind.forward, "__code__", None), _Scaled.forward.__code__
    same = code is not None and (code.co_code, code.co_names) == (copied.co_code, copied.co_names)
    return float(scale) if same else None


@dataclass(frozen=True)
class _Weight:
    """A dense weight and the modules that hold it, each under every name it has."""

    weight: Tensor
    members: tuple[tuple[str, nn.Module], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)


def _weights(model: nn.Module) -> list[_Weight]:
    members: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    weights: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and (isinstance(module, _KINDS) or _is_conv1d(module)):
            weight = _weight(module)
            weights[id(weight)] = weight
            members[id(weight)].append((name, module))
    return [_Weight(weight, tuple(members[key])) for key, weight in weights.items()]


def _other_holders(model: nn.Module, names: Iterable[str]) -> dict[int, str]:
    """id of a parameter -> its name where it is not the weight of one of the modules ``names``."""
    replaced = {f"{name}.weight" for name in names}
    held = model.named_parameters(remove_duplicate=False)
    return {id(parameter): name for name, parameter in held if name not in replaced}


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_conv1d(module: nn.Module) -> bool:
    return _path(module) == _CONV1D


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _matrix(module: nn.Module) -> Tensor:
    """The weight as [out, in], of experts as [experts · out, in]."""
    return _weight(module).t() if _is_conv1d(module) else _weight(module).flatten(0, -2)


def _spelled(name: str, plan: Mapping[str, str]) -> bool:
    """Whether the pattern that decides on a module ends in its own name."""
    pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), "")
    return pattern.endswith(name.rpartition(".")[2])


def _decide(
    group: _Weight,
    formats: Mapping[str, BlockFormat],
    exclude: tuple[str, ...],
    readers: Mapping[str, str],
    holders: Mapping[int, str],
) -> tuple[BlockFormat | None, str | None]:
    """The format of a weight, or the reason why it stays dense."""
    for name, module in group.members:
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            return None, f"{name} is excluded"
        if name not in formats:
            return None, f"no pattern matches {name}"
        if (reason := _unsupported(module)) is not None:
            return None, f"{name} {reason}"
        if name in readers:
            return None, f"{name} is not only called: {readers[name]}"
    if (holder := holders.get(id(group.weight))) is not None:
        return None, f"the parameter {holder} is the same weight, and would not be packed"
    if len({_is_conv1d(module) for _, module in group.members}) > 1:
        return None, "shared by modules that read it in two directions"
    chosen = {formats[name].name for name in group.names}
    if len(chosen) > 1:
        raise FormatError(f"{' and '.join(group.names)} share a weight; give them one format, not {chosen}")
    fmt, (rows, columns) = formats[group.names[0]], _matrix(group.members[0][1]).shape
    if rows * fmt.row_bytes(columns) >= group.weight.nbytes:
        return None, f"too small: {columns} columns are {fmt.row_bytes(columns)} bytes of {fmt.name}"
    return fmt, None


def _unsupported(module: nn.Module) -> str | None:
    kind = type(module)
    if kind not in _KINDS and _path(module) not in (_CONV1D, _FALCON_LINEAR) and row_scale(module) is None:
        return f"is a {kind.__name__}, which may compute something else"
    if parametrize.is_parametrized(module):
        return "has parametrizations"
    if "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS):
        return "has hooks or a forward of its own"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "has max_norm"
    weight = _weight(module)
    if weight.is_meta or weight.dtype not in FLOATS or weight.numel() == 0:
        return f"holds no float values ({weight.dtype} on {weight.device})"
    return None


def _quantize_one(
    model: nn.Module, group: _Weight, fmt: BlockFormat | None, reason: str | None, activations: str
) -> ModuleReport:
    before = after = group.weight.nbytes
    if fmt is not None:
        after = _replace(model, group, fmt.name, activations).nbytes
    return ModuleReport(group.names, fmt.name if fmt else None, reason, before, after)


@torch.no_grad()
def _replace(model: nn.Module, group: _Weight, fmt: str, activations: str) -> Tensor:
    """Puts packed modules, which share one weight, in the place of the group's; returns that weight."""
    packed: nn.Parameter | None = None
    new: dict[int, nn.Module] = {}
    for name, module in group.members:
        if id(module) not in new:
            if packed is None:
                packed = _encode(name, module, fmt)
            new[id(module)] = _packed_module(module, packed, fmt, activations)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[id(module)])
    assert packed is not None
    return packed


def _encode(name: str, module: nn.Module, fmt: str) -> nn.Parameter:
    try:
        blocks = ops.quantize(_matrix(module), fmt)
        if isinstance(module, DenseExperts):
            blocks = blocks.unflatten(0, module.weight.shape[:2])
        return nn.Parameter(blocks, requires_grad=False)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def _packed_module(module: nn.Module, weight: nn.Parameter, fmt: str, activations: str) -> nn.Module:
    new: QuantizedEmbedding | QuantizedLinear | QuantizedExperts
    if isinstance(module, DenseExperts):
        new = QuantizedExperts(weight.data, module.weight.shape[-1], fmt, activations=activations)
    elif isinstance(module, nn.Embedding):
        width, dtype, scale = module.embedding_dim, module.weight.dtype, row_scale(module)
        table = QuantizedEmbedding if scale is None else ScaledEmbedding
        new = table.from_blocks(weight.data, width, fmt, module.padding_idx, dtype=dtype)
        if isinstance(new, ScaledEmbedding) and scale is not None:
            new.scale = scale
    else:
        bias, columns = module.bias, _matrix(module).shape[1]
        assert bias is None or isinstance(bias, Tensor)
        new = QuantizedLinear.from_blocks(weight.data, columns, fmt, bias, activations=activations)
    new.weight = weight
    return new.train(module.training)
