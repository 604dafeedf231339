"""torch.autocast: packed layers give the dtype that dense ones give, and norms keep float32 statistics."""

import pytest
import torch
from cases import assert_within, float_tolerance, int8_tolerance, random_activations, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch.nn.mlp import GatedMLP

COLUMNS = 300


def _packed(rows: int = 33, **kwargs) -> rt.QuantizedLinear:
    return rt.QuantizedLinear.from_blocks(
        random_blocks("Q4_K", rows, COLUMNS), COLUMNS, "Q4_K", torch.randn(rows), **kwargs
    )


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_linear_casts_as_nn_linear_does(activations: str, dtype: torch.dtype, autocast: torch.dtype) -> None:
    module, x = _packed(activations=activations), random_activations(4, COLUMNS, dtype=dtype)
    dense = module.to_linear().to(dtype)
    with torch.autocast("cpu", autocast):
        y, expected = module(x), dense(x)
    assert y.dtype == expected.dtype
    seen = x if dtype == torch.float64 else x.to(autocast)
    bias = module.bias.to(y.dtype)
    exact = seen.double() @ module.dequantize(torch.float64).T + bias.double()
    tolerance = float_tolerance(seen, module.dequantize(), y.dtype) + 2**-7 * bias.double().abs()
    if activations == "int8":
        tolerance += int8_tolerance(seen, module.dequantize())
    assert_within(y, exact, tolerance)


@pytest.mark.parametrize("fmt", ["Q4_K", None])
@pytest.mark.parametrize("count", [1, 2])
def test_norms_before_packed_layers_are_not_rounded(fmt: str | None, count: int) -> None:
    """Rows of 500 ± 0.5: bf16 knows only steps of 2 there, so statistics of rounded rows are all wrong."""
    linears = [_packed() if fmt else nn.Linear(COLUMNS, 33) for _ in range(count)]
    module = rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), *linears)
    x = 500 + 0.5 * torch.randn(4, COLUMNS)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(x) if count > 1 else (module(x),)
    normed = nn.functional.layer_norm(x.double(), (COLUMNS,)).to(torch.bfloat16).double()
    for y, linear in zip(outputs, linears, strict=True):
        assert y.dtype == torch.bfloat16
        dense = linear.to_linear() if fmt else linear
        weight, bias = (p.detach().double() for p in (dense.weight, dense.bias))
        # a float32 row may round to the other bf16 neighbour; a dense weight is rounded too
        slack = 2**-7 * (normed.abs() @ weight.abs().T) + 2**-7 * bias.abs()
        assert_within(y, normed @ weight.T + bias, slack + 2**-7 * (normed @ weight.T).abs())


def test_shared_activations_follow_autocast_too() -> None:
    parts = [_packed(48, activations="int8") for _ in range(2)]
    down = rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 8, 48), 48, "Q4_K", activations="int8")
    mlp, x = GatedMLP(*parts, down, activation="silu"), random_activations(2, COLUMNS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        gate, up = (part(x) for part in parts)
        expected = down(nn.functional.silu(gate) * up)
        y = mlp(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


def test_gradients_arrive_in_the_dtype_of_the_input() -> None:
    module, x = _packed(), random_activations(4, COLUMNS).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert x.grad.dtype == torch.float32
    expected = grad.double() @ module.dequantize(torch.float64)
    # the gradient of the cast x is rounded once
    assert_within(x.grad, expected, 2**-8 * expected.abs() + 1e-3)


def test_wrong_arguments_are_our_errors_under_autocast() -> None:
    module = rt.FusedLayerNormLinear(COLUMNS, 4, fmt="Q4_K")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(rt.FormatError, match="last dimension 300"):
        rt.ops.norm_linear(
            torch.ones(2, 299), module.layer_norm_weight, None, module.weight, "Q4_K", COLUMNS,
            normalization="layernorm", eps=1e-5,
        )  # fmt: skip


def test_compiled_autocast_equals_eager() -> None:
    model = nn.Sequential(rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), _packed(COLUMNS)), _packed())
    x = random_activations(4, COLUMNS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = model(x), compiled(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
