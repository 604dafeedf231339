"""A small model of every kind of packed module, and one cell of the matrix that operates on it."""

import hashlib
from dataclasses import dataclass

import pytest
import torch
from cases import random_activations, random_blocks
from torch import Tensor, nn
from torch.nn import functional

import realizar_torch as rt
from realizar_torch.nn.embedding import ScaledEmbedding
from realizar_torch.nn.experts import QuantizedExperts
from realizar_torch.nn.layout import PackedModule

ROWS, COLUMNS = 5, 300


class PackedModel(nn.Module):
    """A table and its tied head, another that scales its rows, a linear layer, two experts of each row, and
    one norm that feeds weights of three formats."""

    def __init__(self, fmt: str, seed: int):
        super().__init__()
        table, single, part, first, second, scaled, other = (
            random_blocks(name, ROWS, COLUMNS, 7 * seed + i) for i, name in enumerate([fmt] * 6 + ["Q5_1"])
        )
        linear = rt.QuantizedLinear.from_blocks
        self.table = rt.QuantizedEmbedding.from_blocks(table, COLUMNS, fmt)
        self.head = linear(table, COLUMNS, fmt)
        self.head.weight = self.table.weight
        self.scaled = ScaledEmbedding.from_blocks(scaled, COLUMNS, fmt)
        self.scaled.scale = 640**0.5
        self.experts = QuantizedExperts(torch.stack((first, second)), COLUMNS, fmt)
        self.linear = linear(single, COLUMNS, fmt, torch.randn(ROWS))
        parts = linear(part, COLUMNS, fmt, torch.randn(ROWS)), linear(other, COLUMNS, "Q5_1")
        norm = nn.LayerNorm(COLUMNS)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        self.fused = rt.FusedLayerNormLinear.fuse(norm, *parts, nn.Linear(COLUMNS, ROWS))

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        experts = self.experts(x[:, None], ids % 2)
        return self.table(ids), self.scaled(ids), experts, self.head(x), self.linear(x), *self.fused(x)

    def rounding(self, ids: Tensor, x: Tensor) -> list[Tensor]:
        """For each output the sum of the absolute values it is made of: what a relative error multiplies."""
        fused = self.fused
        scale, shift = fused.layer_norm_weight, fused.layer_norm_bias
        normed = functional.layer_norm(x, (COLUMNS,)).abs() * scale.abs() + shift.abs()
        sums = [self.table(ids).abs(), self.scaled(ids).abs()]
        sums.append((self.experts.dequantize()[ids % 2].abs() @ x.abs()[:, None, :, None])[..., 0])
        sums.append(x.abs() @ self.head.dequantize().abs().T)
        sums.append(x.abs() @ self.linear.dequantize().abs().T + self.linear.bias.abs())
        for weight, fmt, bias in zip(fused.weight, fused.fmt, fused.bias, strict=True):
            decoded = weight if fmt is None else rt.dequantize(weight, fmt, COLUMNS)
            sums.append(normed @ decoded.abs().T + (0 if bias is None else bias.abs()))
        return sums


@dataclass(frozen=True)
class Cell:
    """Where a surgery takes place."""

    fmt: str
    device: str
    layout: str

    @property
    def runs(self) -> bool:
        """Whether this device has kernels for this layout."""
        return has_kernels(self.fmt, self.device, self.layout)

    def build(self, seed: int = 0, layout: str | None = None) -> PackedModel:
        """The same model for the same seed, prepacked."""
        torch.manual_seed(seed)
        model = PackedModel(self.fmt, seed).to(self.device)
        rt.prepack(model, layout or self.layout)
        return model

    def inputs(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[3, 0], [4, 4]], device=self.device)
        return ids, random_activations(2, COLUMNS, dtype=dtype).to(self.device)

    def check(self, model: nn.Module) -> None:
        """``model`` computes exactly what ``build()`` computes; where it cannot run, it says so."""
        if self.runs:
            expected = self.build()(*self.inputs())
            for y, right in zip(model(*self.inputs()), expected, strict=True):
                assert torch.equal(y, right)
        else:
            with pytest.raises(rt.FormatError, match=f"layout '{self.layout}'.*rt.unpack"):
                model(*self.inputs())


def has_kernels(fmt: str, device: str, layout: str) -> bool:
    """Whether the ops take ``layout`` on ``device``; elsewhere they say so."""
    if layout == "ggml" or device == "cpu":
        return layout == "ggml"
    from realizar_torch.triton_kernels.launch import GGML_ONLY

    return fmt not in GGML_ONLY


def load_decoded(dense: nn.Module, model: nn.Module) -> int:
    """Puts what the packed modules of ``model`` decode into its dense copy, and counts them."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    for name, module in packed.items():
        old, weight = dense.get_submodule(name), module.dequantize()
        old.weight.data = weight.T if type(old).__name__ == "Conv1D" else weight
    return len(packed)


def digest(model: nn.Module) -> dict[str, str]:
    """Keys of packed weights and hashes of their canonical bytes, wherever they are."""
    return {
        key: hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest()
        for key, value in model.state_dict().items()
        if value.dtype == torch.uint8
    }
