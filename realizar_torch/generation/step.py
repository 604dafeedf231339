"""prefill and decode_step: the one pair that every loop calls, over a DecodeState."""

import torch
from torch import Tensor

from realizar_torch.errors import FormatError
from realizar_torch.generation.cpu_step import CpuStep, can_fuse
from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.kv_cache import KVCache


class DecodeState:
    """What a running generation owns: the cache, the scratch memory, the fused CPU step if there is one."""

    def __init__(self, model: Transformer, batch_size: int, max_positions: int):
        self.cache = KVCache(model.config, batch_size, max_positions, device=model.device, dtype=model.dtype)
        self.workspace = Workspace.for_model(model.config, batch_size, device=model.device)
        self.fused: CpuStep | None = None


def new_state(model: Transformer, batch_size: int, max_positions: int) -> DecodeState:
    """An empty state for ``batch_size`` sequences of up to ``max_positions`` positions."""
    return DecodeState(model, batch_size, max_positions)


def prefill(
    model: Transformer, input_ids: Tensor, attention_mask: Tensor | None, state: DecodeState
) -> Tensor:
    """Runs the prompt in one pass and fills the cache.

    input_ids int [B, T] -> fp32 logits [B, V] of the last position.
    """
    state.fused = CpuStep(model, state.cache, state.workspace) if can_fuse(model, state.cache) else None
    return model(input_ids, attention_mask, cache=state.cache, logits_to_keep=1).logits[:, -1]


def decode_step(model: Transformer, token_ids: Tensor, state: DecodeState) -> Tensor:
    """Appends one token per sequence.

    token_ids int64 [B] -> fp32 logits [B, V], valid until the next step.
    """
    if token_ids.shape != (state.cache.batch_size,) or token_ids.dtype != torch.int64:
        raise FormatError(
            f"token_ids are {token_ids.dtype} {list(token_ids.shape)}, "
            f"expected int64 [{state.cache.batch_size}]"
        )
    state.cache.require(1)
    if state.fused is not None:
        return state.fused.run(token_ids)
    return model(token_ids[:, None], cache=state.cache).logits[:, -1]
