"""What a model multiplies, read from the header of its file: shapes and formats, no weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.diagnosis.parity import Matrix
from realizar_torch.formats import PACKED_FORMATS
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.tensors import MODEL_TENSORS, check_tensors, layer_names

_ROWS, _COLUMNS = 96, 512
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Shapes:
    """Every packed weight once, by its use. normed: those whose input is a norm's output. projections: q, k
    and v of one layer. pairs: gate, of which up is a twin. experts: one expert's matrix, and how many there
    are. config: None where there is no model."""

    matrices: tuple[Matrix, ...]
    tables: tuple[Matrix, ...] = ()
    normed: tuple[Matrix, ...] = ()
    projections: tuple[tuple[Matrix, Matrix, Matrix], ...] = ()
    pairs: tuple[Matrix, ...] = ()
    experts: tuple[tuple[Matrix, int], ...] = ()
    config: ModelConfig | None = None


def small_shapes() -> Shapes:
    """Every format, without a model."""
    return Shapes(tuple(Matrix(fmt.name, _ROWS, _COLUMNS) for fmt in PACKED_FORMATS))


def shapes_of(source: ModelSource) -> Shapes:
    """Those of an open model; raises what loading it would raise."""
    path = shown_path(source.path)
    config = ModelConfig.from_gguf(source.metadata, path)
    check_tensors(source.tensors, config, path)
    packed = {name: info for name, info in source.tensors.items() if info.fmt.packed}
    matrices = [_matrix(info) for info in packed.values() if len(info.shape) == 2]
    embedding = packed.get(f"{MODEL_TENSORS['embed_tokens']}.weight")
    layers = [
        {module: packed.get(f"{name}.weight") for module, name in layer_names(layer, source.tensors).items()}
        for layer in range(config.num_layers)
    ]
    gates = [layer.get("mlp.gate_proj") for layer in layers]
    ups = [layer.get("mlp.up_proj") for layer in layers]
    return Shapes(
        matrices=_once(matrices),
        tables=() if embedding is None else (_matrix(embedding),),
        normed=_once(matrix for matrix in matrices if matrix.in_features == config.hidden_size),
        projections=_once(filter(None, (_projection(layer, config) for layer in layers))),
        pairs=_once(
            _matrix(gate)
            for gate, up in zip(gates, ups, strict=True)
            if gate is not None and up is not None and gate.fmt == up.fmt
        ),
        experts=_once(
            (Matrix(info.fmt.name, *info.shape[1:]), info.shape[0])
            for info in packed.values()
            if len(info.shape) == 3
        ),
        config=config,
    )


def _matrix(info: TensorInfo) -> Matrix:
    return Matrix(info.fmt.name, *info.shape)


def _projection(
    layer: Mapping[str, TensorInfo | None], config: ModelConfig
) -> tuple[Matrix, Matrix, Matrix] | None:
    """q, k and v of a layer, as three tensors or as one; None where not all of them are packed."""
    rows = (config.q_dim, config.kv_dim, config.kv_dim)
    fused = layer.get("self_attn.qkv_proj")
    parts = [fused or layer.get(f"self_attn.{name}_proj") for name in "qkv"]
    if None in parts:
        return None
    q, k, v = (
        Matrix(part.fmt.name, count, config.hidden_size)
        for part, count in zip(parts, rows, strict=True)
        if part is not None
    )
    return q, k, v


def _once(items: Iterable[_Item]) -> tuple[_Item, ...]:
    return tuple(dict.fromkeys(items))
