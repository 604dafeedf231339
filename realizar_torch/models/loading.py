"""From an open model source to a Transformer: every tensor is bound by name, or nothing is loaded."""

from collections.abc import Callable

import torch

from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.models.building import ModelBuilder
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.tensors import MODEL_TENSORS, check_tensors
from realizar_torch.models.transformer import Transformer


def load_transformer(
    file: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    activations: str,
    max_seq_len: int | None = None,
    model_class: type[Transformer] = Transformer,
    progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Builds the model of an open source. Weights on the CPU stay views of its private file mapping, but for
    q and k of converted files, whose rows are put into another order.

    dtype: of activations, norms, biases and dense weights; None: each tensor keeps its own, for a model that
    is saved and not run. activations: "float" or "int8", for every packed linear.
    max_seq_len: positions that the model shall see, which decides between the two sets of LongRoPE; None:
    the file's context length.
    """
    source = shown_path(file.path)
    config = ModelConfig.from_gguf(file.metadata, source)
    check_tensors(file.tensors, config, source)

    build = ModelBuilder(file, config, device, dtype, activations)
    embedding = build.embedding(MODEL_TENSORS["embed_tokens"])
    layers = []
    for layer in range(config.num_layers):
        layers.append(build.block(layer))
        if progress is not None:
            progress(layer + 1, config.num_layers)
    norm, head = build.norm(MODEL_TENSORS["norm"]), build.head(embedding)
    divisors = build.rope_divisors(max_seq_len or config.context_length)
    model = model_class(config, embedding, layers, norm, head, divisors, build.positions())
    return model.to(device).eval()
