"""FusedLayerNormLinear: equal to norm then linear, one or several weights, packed or dense."""

import itertools

import pytest
import torch
from cases import PACKED, assert_within, float_tolerance, random_activations, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch.nn import norm_linear
from realizar_torch.nn.norm import LayerNorm, RMSNorm
from realizar_torch.ops import bodies

COLUMNS = 300


def _packed(fmt: str = "Q4_K", rows: int = 33, bias: bool = True, **kwargs) -> rt.QuantizedLinear:
    blocks = random_blocks(fmt, rows, COLUMNS)
    return rt.QuantizedLinear.from_blocks(blocks, COLUMNS, fmt, torch.randn(rows) if bias else None, **kwargs)


def _random(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data.normal_()
    return module


NORMS = {
    "LayerNorm": lambda: _random(LayerNorm(COLUMNS)),
    "LayerNorm-no-bias": lambda: _random(LayerNorm(COLUMNS, 1e-3, bias=False)),
    "RMSNorm": lambda: _random(RMSNorm(COLUMNS)),
    "RMSNorm-zero-centered": lambda: _random(RMSNorm(COLUMNS, zero_centered=True)),
    "torch-LayerNorm": lambda: _random(nn.LayerNorm(COLUMNS)),
    "torch-LayerNorm-no-bias": lambda: _random(nn.LayerNorm(COLUMNS, bias=False)),
    "torch-RMSNorm": lambda: _random(nn.RMSNorm(COLUMNS, eps=1e-6)),
}


def _assert_equals_norm_then_linear(
    y: torch.Tensor, norm: nn.Module, linear: nn.Module, x: torch.Tensor
) -> None:
    """Against float64; the float32 normalised row adds a few roundings to those of the product."""
    normed = norm.double()(x.double())
    dense = linear.to_linear(torch.float64) if isinstance(linear, rt.QuantizedLinear) else linear.double()
    expected = nn.functional.linear(normed, dense.weight, None if dense.bias is None else dense.bias.double())
    tolerance = float_tolerance(normed, dense.weight, y.dtype) + float_tolerance(
        normed, dense.weight, torch.float32
    )
    assert_within(y, expected, tolerance + 2**-7 * (y.dtype != torch.float32) + 1e-6)
    norm.float()
    linear.float()


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("fmt", [*PACKED, None])
def test_fused_pair_equals_norm_then_linear(fmt: str | None, norm) -> None:
    norm = norm()
    linear = nn.Linear(COLUMNS, 33) if fmt is None else _packed(fmt)
    module, x = rt.FusedLayerNormLinear.fuse(norm, linear), random_activations(2, 3, COLUMNS)
    y = module(x)
    assert y.shape == (2, 3, 33)
    _assert_equals_norm_then_linear(y, norm, linear, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_norm_several_weights_gives_a_tuple(dtype: torch.dtype) -> None:
    norm = _random(nn.LayerNorm(COLUMNS))
    linears = [
        _packed("Q4_K", 33),
        _packed("Q6_K", 7, bias=False),
        nn.Linear(COLUMNS, 5, dtype=torch.float32),
    ]
    module, x = rt.FusedLayerNormLinear.fuse(norm, *linears), random_activations(4, COLUMNS, dtype=dtype)
    outputs = module(x)
    assert isinstance(outputs, tuple)
    assert (module.fmt, module.out_features) == (("Q4_K", "Q6_K", None), (33, 7, 5))
    for y, linear in zip(outputs, linears, strict=True):
        assert y.dtype == dtype
        _assert_equals_norm_then_linear(y, norm, linear, x)


def test_several_int8_weights_equal_single_ones_bit_for_bit() -> None:
    norm = _random(nn.RMSNorm(COLUMNS, eps=1e-6))
    linears = [_packed(fmt, 33, activations="int8") for fmt in ("Q4_K", "Q5_0")]
    x = random_activations(3, COLUMNS)
    together = rt.FusedLayerNormLinear.fuse(norm, *linears)
    assert together.activations == "int8"
    for y, linear in zip(together(x), linears, strict=True):
        assert torch.equal(y, rt.FusedLayerNormLinear.fuse(norm, linear)(x))


@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_normalised_once_for_all_weights(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen = []
    for owner in (bodies, norm_linear):
        original = owner.normalize
        monkeypatch.setattr(
            owner, "normalize", lambda *args, f=original: seen.append(args[0].shape) or f(*args)
        )
    module = rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), *(_packed() for _ in range(count)))
    module(torch.randn(4, COLUMNS))
    assert seen == [(4, COLUMNS)]


def test_fuse_shares_parameters() -> None:
    norm, linear = nn.LayerNorm(COLUMNS), _packed()
    module = rt.FusedLayerNormLinear.fuse(norm, linear)
    assert module.layer_norm_weight is norm.weight
    assert module.layer_norm_bias is norm.bias
    assert module.weight is linear.weight
    assert module.bias is linear.bias
    assert module.memory_bytes == linear.memory_bytes + 8 * COLUMNS


def test_keys() -> None:
    make = rt.FusedLayerNormLinear
    assert list(make(COLUMNS, 4).state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    rms = make(COLUMNS, 4, bias=False, fmt="Q8_0", normalization="rmsnorm")
    assert list(rms.state_dict()) == ["layer_norm_weight", "weight"]
    several = make(COLUMNS, (4, 5), fmt=("Q4_K", None))
    assert list(several.state_dict()) == [
        "layer_norm_weight",
        "layer_norm_bias",
        "weight.0",
        "weight.1",
        "bias.0",
        "bias.1",
    ]


def test_new_dense_module_starts_as_linear_after_identity_norm() -> None:
    module = rt.FusedLayerNormLinear(COLUMNS, 8, normalization="rmsnorm", zero_centered=True)
    x = random_activations(2, COLUMNS)
    expected = nn.functional.linear(
        nn.functional.rms_norm(x, (COLUMNS,), eps=1e-5), module.weight, module.bias
    )
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert 0 < module.weight.abs().max() <= COLUMNS**-0.5


@pytest.mark.parametrize("several", [False, True])
def test_state_dict_round_trip_and_format_guard(several: bool) -> None:
    linears = [_packed("Q4_K"), _packed("Q8_0", 7)] if several else [_packed("Q4_K")]
    module = rt.FusedLayerNormLinear.fuse(_random(nn.LayerNorm(COLUMNS)), *linears)
    state = nn.Sequential(module).state_dict()

    def new(fmt) -> rt.FusedLayerNormLinear:
        return rt.FusedLayerNormLinear(COLUMNS, module.out_features, fmt=fmt)

    other, x = new(module.fmt), random_activations(2, COLUMNS)
    nn.Sequential(other).load_state_dict(state)
    for a, b in zip(other(x), module(x), strict=True):
        assert torch.equal(a, b)
    wrong = ("Q4_0", "Q8_0") if several else "Q4_0"
    with pytest.raises(rt.FormatError, match=r"stored as .*Q4_K.* made for .*Q4_0"):
        nn.Sequential(new(wrong)).load_state_dict(state)
    key = "weight.0" if several else "weight"
    with pytest.raises(rt.FormatError, match=f"{key} is torch.float32, expected torch.uint8 bytes of Q4_K"):
        new(module.fmt).load_state_dict({key: torch.zeros(33, 4)}, strict=False)


@pytest.mark.parametrize(("fmt", "several"), list(itertools.product(["Q5_1", None], [False, True])))
def test_everything_that_floats_can_be_trained(fmt: str | None, several: bool) -> None:
    linears = [_packed(fmt) if fmt else nn.Linear(COLUMNS, 33) for _ in range(1 + several)]
    norm = _random(nn.LayerNorm(COLUMNS))
    module, x = rt.FusedLayerNormLinear.fuse(norm, *linears), random_activations(2, COLUMNS).requires_grad_()
    outputs = module(x) if several else (module(x),)
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    actual = [x.grad, *(p.grad for p in module.parameters() if p.is_floating_point())]

    x64 = x.detach().double().requires_grad_()
    norm64 = nn.LayerNorm(COLUMNS).double()
    norm64.load_state_dict(norm.state_dict())
    dense = [m.to_linear(torch.float64) if fmt else m.double() for m in linears]
    torch.autograd.backward([m(norm64(x64)) for m in dense], [g.double() for g in grads])
    weights = [] if fmt else [m.weight.grad for m in dense]
    expected = [x64.grad, norm64.weight.grad, norm64.bias.grad, *weights, *(m.bias.grad for m in dense)]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3)


def test_compiles_without_graph_breaks() -> None:
    norm, x = nn.LayerNorm(COLUMNS), torch.randn(2, COLUMNS)
    for linears in ([_packed()], [_packed(), _packed("Q8_0")]):
        module = rt.FusedLayerNormLinear.fuse(norm, *linears)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: c(0, 4), "in_features=0"),
        (lambda c: c(COLUMNS, 0), "out_features=0"),
        (lambda c: c(300.0, 4), r"in_features is 300\.0, a float"),
        (lambda c: c(COLUMNS, 4.0), r"out_features is 4\.0, a float"),
        (lambda c: c(COLUMNS, (4, 5.0)), r"out_features is 5\.0, a float"),
        (lambda c: c(COLUMNS, ()), "0 out_features and 0 formats"),
        (lambda c: c(COLUMNS, (4, 5), fmt=("Q4_K",)), "2 out_features and 1 formats"),
        (lambda c: c(COLUMNS, 4, normalization="batch"), "normalization is 'batch'"),
        (lambda c: c(COLUMNS, 4, activations="int4"), "activations is 'int4'"),
        (lambda c: c(COLUMNS, 4)(torch.ones(2, 299)), "expected last dimension 300"),
        (lambda c: c(COLUMNS, (4, 5))(torch.ones(2, 299)), "expected last dimension 300"),
        (lambda c: c.fuse(nn.LayerNorm(COLUMNS)), "at least one linear"),
        (lambda c: c.fuse(nn.LayerNorm(8), _packed()), "a linear takes 300 features, the norm gives 8"),
        (lambda c: c.fuse(nn.BatchNorm1d(COLUMNS), _packed()), "cannot fuse a BatchNorm1d"),
        (lambda c: c.fuse(nn.LayerNorm(COLUMNS), nn.Identity()), "cannot fuse a Identity"),
        (lambda c: c.fuse(nn.LayerNorm((2, COLUMNS)), _packed()), "one dimension"),
        (lambda c: c.fuse(nn.LayerNorm(COLUMNS, elementwise_affine=False), _packed()), "a weight"),
        (lambda c: c.fuse(nn.RMSNorm(COLUMNS), _packed()), "a stated eps"),
        (
            lambda c: c.fuse(nn.LayerNorm(COLUMNS), _packed(), _packed(activations="int8")),
            "differ in activations",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message: str) -> None:
    with pytest.raises(rt.FormatError, match=message):
        make(rt.FusedLayerNormLinear)


class _Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Shifted(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class _Named(rt.QuantizedLinear):
    """A subclass that computes what its parent does."""


def _changed(module: nn.Module, change) -> nn.Module:
    change(module)
    return module


@pytest.mark.parametrize(
    ("norm", "linear", "message"),
    [
        (nn.LayerNorm(COLUMNS), _Scaled(COLUMNS, 4), "_Scaled is a subclass with a forward of its own"),
        (_Shifted(COLUMNS), nn.Linear(COLUMNS, 4), "_Shifted is a subclass"),
        (
            nn.LayerNorm(COLUMNS),
            _changed(_packed(), lambda m: m.register_forward_hook(lambda m, args, y: 2 * y)),
            "this QuantizedLinear has hooks",
        ),
        (
            _changed(RMSNorm(COLUMNS), lambda m: m.register_forward_pre_hook(lambda m, args: args)),
            _packed(),
            "this RMSNorm has hooks",
        ),
        (
            nn.LayerNorm(COLUMNS),
            _changed(nn.Linear(COLUMNS, 4), lambda m: m.register_full_backward_hook(lambda m, a, b: None)),
            "this Linear has hooks",
        ),
        (
            nn.LayerNorm(COLUMNS),
            _changed(_packed(), lambda m: setattr(m, "forward", m.dequantize)),
            "this QuantizedLinear was given a forward of its own",
        ),
        (
            nn.LayerNorm(COLUMNS),
            nn.utils.parametrizations.weight_norm(nn.Linear(COLUMNS, 4)),
            "has parametrizations",
        ),
        (nn.LayerNorm(COLUMNS), _changed(_packed(), lambda m: rt.prepack(m, "planar")), "rt.unpack"),
    ],
)
def test_modules_that_do_more_are_not_fused(norm: nn.Module, linear: nn.Module, message: str) -> None:
    with pytest.raises(rt.FormatError, match=message):
        rt.FusedLayerNormLinear.fuse(norm, linear)


def test_subclasses_that_change_nothing_are_fused() -> None:
    named = _Named.from_blocks(random_blocks("Q4_K", 4, COLUMNS), COLUMNS, "Q4_K")
    assert rt.FusedLayerNormLinear.fuse(nn.LayerNorm(COLUMNS), named).weight is named.weight
