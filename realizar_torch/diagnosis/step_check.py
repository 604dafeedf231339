"""The fused prompt pass and decode step against the modules, on random weights in a model's shapes."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.diagnosis.parity import MOST_ROWS, Parity, random_blocks
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.tensors import expected_shapes
from realizar_torch.models.transformer import Transformer
from realizar_torch.surgery import prepack

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS, _PROMPT, _STEPS = 2, 18, 6
_WINDOW, _EXPERTS = 16, 8
# of the largest logit, where both sides are fp32: some ten products in a row, each within 1e-5 of sum|w x|,
# which is less than 10 times the result's size
_FLOAT_ERROR = 1e-4
# int8 logits may be this much farther from the exact ones than the modules' are
_INT8_ERROR = 1.2


class RandomSource(SourceView):
    """A source of the same architecture, widths and formats with random weights: no more layers than it takes
    to have one of each kind, the vocabulary, the MLP and the window cut."""

    def __init__(self, source: ModelSource):
        super().__init__(source)
        full = ModelConfig.from_gguf(source.metadata, str(source.path))
        other = (n for n in range(full.num_layers) if full.is_sliding(n) != full.is_sliding(0))
        layers = 1 + next(other, 0)
        changes: dict[str, Any] = {
            "block_count": layers,
            "vocab_size": min(full.vocab_size, MOST_ROWS),
            "feed_forward_length": min(full.intermediate_size, MOST_ROWS),
            "context_length": min(full.context_length, MOST_ROWS),
        }
        if full.sliding_window:
            changes["attention.sliding_window"] = _WINDOW
            changes["attention.sliding_window_pattern"] = [full.is_sliding(n) for n in range(layers)]
        if full.experts is not None:
            changes["expert_count"] = max(full.experts.used, min(full.experts.count, _EXPERTS))
            changes["expert_feed_forward_length"] = min(full.experts.inner_size, MOST_ROWS)
            changes["expert_shared_feed_forward_length"] = min(full.experts.shared_size, MOST_ROWS)
        self._metadata = {**source.metadata, **{f"{full.arch.name}.{k}": v for k, v in changes.items()}}
        self.config = ModelConfig.from_gguf(self._metadata, str(source.path))
        required, optional = expected_shapes(self.config, source.tensors)
        shapes = required | optional
        self._tensors = {
            name: TensorInfo(name, info.fmt, shapes[name], 0, 0, 0)
            for name, info in source.tensors.items()
            if name in shapes
        }

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        """The same numbers each time: products of size 1, norms and divisors near 1, small biases."""
        info, seed = self._tensors[name], zlib.crc32(name.encode())
        *lead, columns = info.shape
        if info.fmt.packed:
            rows = torch.Size(lead).numel()
            return random_blocks(info.fmt.name, rows, columns, seed).view(*lead, -1)
        normal = torch.randn(info.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        if lead:
            return (normal * columns**-0.5).to(_FLOATS[info.fmt.name])
        near_one = not name.endswith(".bias")
        return (near_one + 0.1 * (normal.abs() if near_one else normal)).to(_FLOATS[info.fmt.name])

    def release(self, name: str) -> None:
        """There is no file behind it."""


@torch.inference_mode()
def check_step(source: ModelSource, device: torch.device) -> Iterator[Parity]:
    """Nothing where the model is not one that a fused step knows."""
    small = RandomSource(source)
    config = small.config
    fmts = "+".join(dict.fromkeys(info.fmt.name for info in small.tensors.values() if info.fmt.packed))
    shape = f"{config.num_layers} layer(s), hidden {config.hidden_size}"
    ids = torch.randint(
        config.vocab_size, (_ROWS, _PROMPT + _STEPS), generator=torch.Generator().manual_seed(0)
    )
    ids, exact = ids.to(device), None
    for activations in ("float", "int8") if fmts else ("float",):
        model = load_transformer(small, device=device, dtype=torch.float32, activations=activations)
        modules = model(ids, logits_to_keep=_STEPS + 1).logits
        prepack(model)
        found = _fused(model, ids)
        if found is None:
            return
        if exact is None:
            exact = modules
            error = _rms(found - modules) / (_FLOAT_ERROR * _rms(modules))
        else:
            error = _rms(found - exact) / (_INT8_ERROR * _rms(modules - exact))
        yield Parity(device.type, f"prompt and decode step {activations}", fmts, shape, _ROWS, error)


def _fused(model: Transformer, ids: Tensor) -> Tensor | None:
    """Logits of the prompt's last position and each step, ``[B, _STEPS + 1, V]``; None: nothing is fused."""
    state = new_state(model, *ids.shape, pooled=False)
    state.prepare(model)
    if state.fused is None:
        return None
    logits = [prefill(model, ids[:, :_PROMPT], None, state).clone()]
    for token in ids[:, _PROMPT:].T:
        logits.append(decode_step(model, token.contiguous(), state).clone())
    state.close()
    return torch.stack(logits, 1)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt().nan_to_num(torch.inf))
