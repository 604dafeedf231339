"""A linear layer whose weight stays packed."""

from typing import Self

import torch
from torch import nn

from realizar_torch import ops
from realizar_torch.nn import packed
from realizar_torch.nn.layout import PackedModule, stored_by
from realizar_torch.ops.checks import check_vector
from realizar_torch.reference import QuantizedActivations, padded_features


class QuantizedLinear(PackedModule):
    """``x @ decode(weight).T + bias``, used as ``nn.Linear``: any leading dimensions, same dtype.

    ``weight``: ``uint8 [out_features, row_bytes]``, frozen bytes of ``fmt`` blocks, rows padded to whole
    blocks; it starts as zeros and is meant to be loaded. ``bias [out_features]`` is an ordinary parameter.
    ``activations="int8"`` quantizes the input in blocks of 32.

    ``model.requires_grad_(True)`` raises inside torch for packed bytes. What trains, averages or initialises
    all parameters has to leave them out: ``[p for p in model.parameters() if p.is_floating_point()]``.
    ``AveragedModel`` changes bytes for some decays without an error; with ``ema = get_ema_multi_avg_fn(…)``,
    ``multi_avg_fn=lambda old, new, n: ema(old, new, n) if old[0].is_floating_point() else None`` does not.

    Code that reads ``weight`` instead of calling the module finds bytes. torch's ``TransformerEncoderLayer``
    does not after ``nn.weight_readers.leave_fast_paths(model)``, which ``quantize_model`` calls.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        fmt: str = "Q4_K",
        activations: str = "float",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        packed.check_activations(activations)
        self.in_features = in_features
        self.out_features = out_features
        self.fmt = fmt
        self.activations = activations
        self.weight = packed.zero_blocks(out_features, in_features, fmt, device)
        start = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", start)

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: str, *, importance: torch.Tensor | None = None) -> Self:
        """Encode an ``nn.Linear``, as ``rt.quantize`` does; the bias is shared, not copied."""
        blocks = ops.quantize(linear.weight, fmt, importance=importance)
        module = cls.from_blocks(blocks, linear.in_features, fmt, linear.bias)
        return module.train(linear.training)

    @classmethod
    def from_blocks(
        cls,
        blocks: torch.Tensor,
        in_features: int,
        fmt: str,
        bias: torch.Tensor | None = None,
        *,
        activations: str = "float",
    ) -> Self:
        """Wrap rows ``uint8 [out_features, row_bytes]`` and ``bias [out_features]``; nothing is copied."""
        weight = packed.wrap_blocks(blocks, in_features, fmt)
        module = cls(in_features, len(blocks), bias=False, fmt=fmt, activations=activations, device="meta")
        module.weight = weight
        if bias is not None:
            check_vector("bias", bias, len(blocks))
            module.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return module

    @property
    def columns(self) -> int:
        """``in_features``."""
        return self.in_features

    @property
    def padded_features(self) -> int:
        """``in_features`` rounded up to whole blocks; formats that agree can share quantized activations."""
        return padded_features(self.in_features, self.fmt)

    def forward(self, x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
        """``x [..., in_features]`` → ``[..., out_features]``; quantized activations give float32."""
        return ops.linear(
            x,
            stored_by(self),
            self.fmt,
            self.in_features,
            self.bias,
            activations=self.activations,
            layout=self.layout,
        )

    own_forward = forward

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The decoded weight ``[out_features, in_features]``."""
        return ops.dequantize(self.stored, self.fmt, self.in_features, dtype=dtype, layout=self.layout)

    def to_linear(self, dtype: torch.dtype = torch.float32) -> nn.Linear:
        """A dense, trainable ``nn.Linear`` of the decoded weight."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.dequantize(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return linear

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activations={self.activations}, {super().extra_repr()}"
        )
