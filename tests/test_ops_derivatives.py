"""Forward mode, torch.func and quantized activations: the same derivatives in every mode, or an error."""

import pytest
import torch
from cases import random_activations, random_blocks
from torch.autograd import forward_ad

from realizar_torch import ops
from realizar_torch.errors import FormatError

COLUMNS, ROWS = 40, 3
WEIGHT = random_blocks("Q4_K", ROWS, COLUMNS)
DECODED = ops.dequantize(WEIGHT, "Q4_K", COLUMNS, dtype=torch.float64)
X, BIAS, SCALE, SHIFT = (
    torch.randn(*shape, dtype=torch.float64) for shape in ((2, COLUMNS), (ROWS,), (COLUMNS,), (COLUMNS,))
)
V = torch.randn_like(X)


def _linear(x: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, WEIGHT, "Q4_K", COLUMNS, BIAS)


def _norm_linear(x: torch.Tensor) -> torch.Tensor:
    return ops.norm_linear(
        x, SCALE, SHIFT, WEIGHT, "Q4_K", COLUMNS, BIAS, normalization="layernorm", eps=1e-2
    )


def _dense_norm(x: torch.Tensor) -> torch.Tensor:
    # spelled out: torch compiles no jvp of layer_norm
    centred = x - x.mean(-1, keepdim=True)
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    return (unit * SCALE + SHIFT) @ DECODED.T + BIAS


OTHER = random_blocks("Q4_K", ROWS, COLUMNS, 1)
OTHER_DECODED = ops.dequantize(OTHER, "Q4_K", COLUMNS, dtype=torch.float64)


def _linears(x: torch.Tensor) -> torch.Tensor:
    return ops.linears(x, [WEIGHT, OTHER], ["Q4_K"] * 2, COLUMNS, [BIAS, None])


def _gated_linear(x: torch.Tensor) -> torch.Tensor:
    return ops.gated_linear(x, WEIGHT, OTHER, "Q4_K", COLUMNS, activation="silu")


PAIRS = {
    "linear": (_linear, lambda x: x @ DECODED.T + BIAS),
    "norm_linear": (_norm_linear, _dense_norm),
    "linears": (_linears, lambda x: torch.cat([x @ DECODED.T + BIAS, x @ OTHER_DECODED.T], -1)),
    "gated_linear": (
        _gated_linear,
        lambda x: torch.nn.functional.silu(x @ DECODED.T) * (x @ OTHER_DECODED.T),
    ),
}


def _dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, V))).tangent


def _vjp(f):
    y, pull = torch.func.vjp(f, X)
    return pull(X[:, : y.shape[1]])


def _loss(f):
    return lambda x: f(x).square().sum().sin()


TRANSFORMS = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (V,)),
    "forward_ad": _dual,
    "jvp-without-grad-mode": lambda f: torch.no_grad()(lambda: torch.func.jvp(f, (X,), (V,)))(),
    "grad": lambda f: torch.func.grad(_loss(f))(X),
    "vjp": _vjp,
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "hessian": lambda f: torch.func.hessian(_loss(f))(X),
    "jvp-of-grad": lambda f: torch.func.jvp(torch.func.grad(_loss(f)), (X,), (V,)),
    "grad-per-sample": lambda f: torch.func.vmap(torch.func.grad(_loss(f)))(X),
    "compiled-grad": lambda f: _compiled(torch.func.grad(_loss(f))),
    "compiled-jvp": lambda f: _compiled(lambda x: torch.func.jvp(f, (x,), (V,))),
}


def _compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)(X)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_transforms_give_the_derivatives_of_the_dense_layer(pair, transform) -> None:
    ours, dense = (transform(f) for f in pair)
    torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-9)


def test_int8_rounding_is_passed_straight_through() -> None:
    def quantized(x):
        return ops.linear(x, WEIGHT, "Q4_K", COLUMNS, activations="int8")

    x, v = X.float(), V.float()
    y, tangent = torch.func.jvp(quantized, (x,), (v,))
    assert torch.equal(y, quantized(x))
    torch.testing.assert_close(tangent, v @ DECODED.float().T, rtol=1e-4, atol=1e-3)
    (grad,) = torch.func.vjp(quantized, x)[1](torch.ones_like(y))
    torch.testing.assert_close(grad, DECODED.float().sum(0).expand(2, -1), rtol=1e-4, atol=1e-3)


# --- quantized activations carry no derivative


def test_quantizing_what_needs_a_gradient_is_refused() -> None:
    x = random_activations(2, COLUMNS).requires_grad_()
    with pytest.raises(FormatError, match=r"no derivative, .* pass x\.detach\(\), or .*activations='int8'"):
        ops.quantize_activations(x, "Q4_K")
    with torch.no_grad():
        expected = ops.quantize_activations(x, "Q4_K")
    assert torch.equal(ops.quantize_activations(x.detach(), "Q4_K").q, expected.q)


def test_a_trained_bias_of_a_quantized_product_is_refused() -> None:
    qx = ops.quantize_activations(random_activations(2, COLUMNS), "Q4_K")
    bias = torch.randn(ROWS, requires_grad=True)
    with pytest.raises(FormatError, match=r"pass x itself with activations='int8', or .*no_grad"):
        ops.linear(qx, WEIGHT, "Q4_K", COLUMNS, bias)
    with torch.no_grad():
        y = ops.linear(qx, WEIGHT, "Q4_K", COLUMNS, bias)
    torch.testing.assert_close(y, ops.linear(qx, WEIGHT, "Q4_K", COLUMNS) + bias.detach())
