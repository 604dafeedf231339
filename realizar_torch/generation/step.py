"""prefill and decode_step: the one pair that every loop calls, over a DecodeState."""

import torch
from torch import Tensor

from realizar_torch.caller import warn_caller
from realizar_torch.errors import BackendUnavailableError, FormatError
from realizar_torch.generation import cpu_prompt
from realizar_torch.generation.cpu_prompt import CpuPrompt
from realizar_torch.generation.cpu_step import CpuStep, why_not
from realizar_torch.generation.gpu_state import GpuState
from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.transformer import Transformer
from realizar_torch.ops.recording import dispatch


class DecodeState:
    """What a running generation owns: the cache, the scratch memory, the fused CPU step if there is one.

    A GpuState in its place has a ``decoder`` too, which issues steps without waiting for them.
    """

    decoder = None

    def __init__(self, model: Transformer, batch_size: int, max_positions: int):
        self.cache = model.new_cache(batch_size, max_positions)
        self.workspace = Workspace.for_model(model.config, batch_size, device=model.device)
        self.fused: CpuStep | None = None
        self.prompt: CpuPrompt | None = None

    def prepare(self, model: Transformer) -> None:
        """Builds the fused step anew; one warning where the modules have to do."""
        reason = why_not(model, self.cache)
        self.fused = None if reason else CpuStep(model, self.cache, self.workspace)
        self.prompt = None if reason or not cpu_prompt.takes(model) else CpuPrompt(model, self.cache)
        if reason and model.device.type == "cpu":
            warn_caller(f"decoding runs module by module, which is slower: {reason}")

    def close(self) -> None:
        """Ends the generation."""


def new_state(
    model: Transformer, batch_size: int, max_positions: int, *, pooled: bool = True
) -> DecodeState | GpuState:
    """An empty state for ``batch_size`` sequences of up to ``max_positions`` positions.

    pooled: on a GPU, one of the model's states, which goes back to it when it is closed.
    """
    if model.device.type == "cuda":
        states = getattr(model, "gpu_states", None) if pooled else None
        if states is not None:
            return states.take(model, batch_size, max_positions)
        return GpuState(model, batch_size, max_positions, None)
    return DecodeState(model, batch_size, max_positions)


def prefill(
    model: Transformer,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    state: DecodeState | GpuState,
    *,
    cuda_graph: bool | str = "auto",
) -> Tensor:
    """Runs the prompt in one pass and fills the cache.

    input_ids int [B, T] -> fp32 logits [B, V] of the last position. cuda_graph: as in ``DecodeGraph.begin``.
    """
    with torch.inference_mode(False), torch.no_grad():
        state.prepare(model)
    require_graph(state, cuda_graph)
    if isinstance(state, GpuState):
        state.compile(model, input_ids.numel() if input_ids.shape[-1] > 1 else 0)
    if state.fused is not None and state.prompt is not None:
        if input_ids.shape[-1] > 1:
            if isinstance(state, GpuState):
                return state.prompt.run(model, input_ids, attention_mask, state.cache, cuda_graph=cuda_graph)
            return state.prompt.run(input_ids, attention_mask)
        model.begin(input_ids, attention_mask, state.cache)
        return dispatch("decode_step", model.device, state.fused.run, input_ids[:, 0].long())
    return model(input_ids, attention_mask, cache=state.cache, logits_to_keep=1).logits[:, -1]


def require_graph(state: DecodeState | GpuState, cuda_graph: bool | str) -> None:
    """BackendUnavailableError where True insists on a graph and a state, once prepared, has none."""
    if cuda_graph is True and state.decoder is None:
        raise BackendUnavailableError(
            "cuda_graph=True: no graph holds this model, whose decoding runs module by module (a warning "
            "says why); use 'auto' or False"
        )


def decode_step(model: Transformer, token_ids: Tensor, state: DecodeState | GpuState) -> Tensor:
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
        return dispatch("decode_step", model.device, state.fused.run, token_ids)
    return model(token_ids[:, None], cache=state.cache).logits[:, -1]
