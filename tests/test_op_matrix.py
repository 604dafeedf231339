"""opcheck over every cell of op × format × device × layout × {contiguous, strided, no rows}, or our error."""

import pytest
import torch
from cases import PACKED, random_activations, random_blocks
from packed_model import has_kernels

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.packing import LAYOUTS, pack

OPS = torch.ops.realizar_torch
ROWS, COLUMNS = 3, 300
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SHAPES = ("contiguous", "strided", "empty")
NORM = {"normalization": "layernorm", "eps": 1e-5}


class Cell:
    """The arguments of one cell: ``strided`` takes every second column of floats and row of weights."""

    def __init__(self, fmt: str, device: str, layout: str, shape: str):
        self.fmt, self.device, self.shape = fmt, device, shape
        self.step = 2 if shape == "strided" else 1
        blocks = random_blocks(fmt, self.step * ROWS, COLUMNS)
        self.weight = pack(blocks, fmt, layout).to(device)[:: self.step]
        self.layout, self.layouts = {"layout": layout}, {"layouts": [layout] * 3}

    def floats(self, *lead: int) -> torch.Tensor:
        return random_activations(*lead, self.step * COLUMNS).to(self.device)[..., :: self.step]

    def x(self) -> torch.Tensor:
        # one number of rows, so that both shapes share kernels
        lead = {"contiguous": (1, 2), "strided": (2,), "empty": (0,)}[self.shape]
        return self.floats(*lead).requires_grad_()

    def vector(self, size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, requires_grad=True)

    def quantized(self) -> list[torch.Tensor]:
        qx = ops.quantize_activations(self.x().detach(), self.fmt)
        return [
            part.repeat_interleave(self.step, -1)[..., :: self.step] for part in (qx.q, qx.scale, qx.sums)
        ]

    @property
    def matrices(self) -> torch.Tensor:
        """Of three experts, the same rows in another order."""
        return torch.stack([self.weight.roll(expert, 0) for expert in range(3)])

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, and two of the three experts for each."""
        x = self.x()[..., None, :]
        return x, torch.randint(0, 3, (*x.shape[:-2], 2), device=self.device)

    def three(self) -> tuple:
        """One input for three weights, of which two have a bias."""
        biases = [self.vector(ROWS), None, self.vector(ROWS)]
        return self.x(), list(self.matrices), [self.fmt] * 3, COLUMNS, biases

    def pair(self) -> tuple:
        return self.x(), self.weight, self.matrices[1], self.fmt, COLUMNS

    def ids(self) -> torch.Tensor:
        ids = torch.tensor([2, 0, 1, 1], device=self.device)
        return ids[:0] if self.shape == "empty" else ids[:: self.step]


CALLS = {
    "linear": lambda c: ((c.x(), c.weight, c.fmt, COLUMNS, c.vector(ROWS)), c.layout),
    "linear-int8": lambda c: ((c.x(), c.weight, c.fmt, COLUMNS), {"activations": "int8"} | c.layout),
    "linears": lambda c: (c.three(), c.layouts),
    "linears-int8": lambda c: (c.three(), {"activations": "int8"} | c.layouts),
    "gated_linear": lambda c: (c.pair(), {"activation": "silu"} | c.layout),
    "gated_linear-int8": lambda c: (c.pair(), {"activation": "gelu", "activations": "int8"} | c.layout),
    "embedding": lambda c: ((c.ids(), c.weight, c.fmt, COLUMNS), {"dtype": torch.float16} | c.layout),
    "dequantize": lambda c: ((c.weight, c.fmt, COLUMNS), {"dtype": torch.bfloat16} | c.layout),
    "norm_linear": lambda c: (
        (c.x(), c.vector(COLUMNS), None, c.weight, c.fmt, COLUMNS, c.vector(ROWS)),
        NORM | c.layout,
    ),
    "linear_quantized": lambda c: ((*c.quantized(), c.weight, c.fmt, COLUMNS), c.layout),
    "expert_linear": lambda c: ((*c.chosen(), c.matrices, c.fmt, COLUMNS), c.layout),
    "expert_linear-int8": lambda c: (
        (*c.chosen(), c.matrices, c.fmt, COLUMNS),
        {"activations": "int8"} | c.layout,
    ),
    "expert_linear_transposed": lambda c: (
        (torch.randn(*(ids := c.chosen()[1]).shape, ROWS, device=c.device), ids, c.matrices, c.fmt, COLUMNS),
        c.layout,
    ),
    "quantize_activations": lambda c: ((c.x().detach(), c.fmt), {}),
    "quantize": lambda c: ((c.floats(ROWS), c.fmt), {}),
}


def _takes_layout(call: str) -> bool:
    return call not in ("quantize_activations", "quantize")


# one worker per format: it compiles a kernel once
CELLS = [
    pytest.param(
        (call, fmt, layout, shape), id=f"{call}-{fmt}-{layout}-{shape}", marks=pytest.mark.xdist_group(fmt)
    )
    for call in CALLS
    for fmt in PACKED
    for layout in (LAYOUTS if _takes_layout(call) else ("ggml",))
    for shape in SHAPES
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cell", CELLS)
def test_opcheck(cell: tuple[str, str, str, str], device: str) -> None:
    call, fmt, layout, shape = cell
    args, kwargs = CALLS[call](Cell(fmt, device, layout, shape))
    op = getattr(OPS, call.removesuffix("-int8")).default
    if has_kernels(fmt, device, layout):
        torch.library.opcheck(op, args, kwargs)
        return
    with pytest.raises(FormatError, match=f"layout '{layout}'.*rt.unpack"):
        op(*args, **kwargs)


def test_no_op_is_left_out() -> None:
    """The dispatcher knows what this package has registered."""
    names = torch._C._dispatch_get_all_op_names()
    ours = {name.removeprefix("realizar_torch::") for name in names if name.startswith("realizar_torch::")}
    assert {call.removesuffix("-int8") for call in CALLS} == ours
