"""How much memory decoding has to read: the weights of a step once, and the keys and values that it sees."""

from collections import Counter

from torch import nn

from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.cache_rows import row_bytes
from realizar_torch.nn.embedding import QuantizedEmbedding
from realizar_torch.nn.experts import MixtureOfExperts


def decode_bytes(model: Transformer, rows: int, prompt_tokens: int, steps: int) -> int:
    """Bytes that ``steps`` decode steps of ``rows`` sequences read behind ``prompt_tokens`` in all.

    Prompts of different lengths count with their mean.
    """
    config = model.config
    position = 2 * config.num_kv_heads * row_bytes(config.head_dim, model.cache_dtype)
    windows = Counter(config.window(layer) for layer in range(config.num_layers))
    seen = sum(
        layers * _positions(prompt_tokens // rows, steps, window) for window, layers in windows.items()
    )
    return steps * weight_bytes(model, rows) + rows * seen * position


def weight_bytes(model: Transformer, rows: int = 1) -> int:
    """Bytes of weights that one step reads: all but tables, of which it reads a row, and unused experts.

    Of a mixture's experts, ``rows`` sequences use as many as they choose, at most all.
    """
    part: dict[nn.Module, float] = {}
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and model.config.experts is not None:
            used = min(1.0, rows * module.used / model.config.experts.count)
            part |= dict.fromkeys(module.experts.modules(), used)
    # by address: an output matrix that is the embedding table counts, once
    sizes = {
        tensor.data_ptr(): tensor.nbytes * part.get(module, 1.0)
        for module in model.modules()
        if not isinstance(module, nn.Embedding | QuantizedEmbedding)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    return round(sum(sizes.values()))


def _positions(prompt: int, steps: int, window: int | None) -> int:
    """Positions that one sequence sees in all of ``steps`` steps, the k-th of which sees prompt + k, or the
    last ``window`` of them."""
    growing = steps if window is None else min(max(window - prompt, 0), steps)
    return growing * prompt + growing * (growing + 1) // 2 + (steps - growing) * (window or 0)
