"""Modules that read the weight of a child: quantize_model leaves the child dense, or adapts the reader."""

import copy
import functools

import pytest
import torch
from packed_model import load_decoded
from torch import nn
from torch.nn import functional

import realizar_torch as rt
from realizar_torch.nn.weight_readers import leave_fast_paths, weight_readers


class Table(nn.Module):
    """Gives its table away, under another module's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.positions = nn.Embedding(50, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.positions(ids)


class Head(nn.Module):
    def forward(self, x: torch.Tensor, words: nn.Embedding) -> torch.Tensor:
        return x @ words.weight.T


class Block(nn.Module):
    """Each way to read a weight, and each that does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = nn.Linear(64, 64)
        self.called = nn.Linear(64, 64)
        self.placed = nn.Linear(64, 64)
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.tied = nn.Linear(64, 64)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.called.weight, std=0.1)

    def tie(self) -> None:
        self.tied.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.placed.weight.device)
        x = self.cast(x.to(self.cast.weight.dtype)) + self.placed(self.called(x))
        return functional.linear(self.tied(self.inner[0](x)), self.inner[1].weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(Block() for _ in "ab")
        self.head = Head()

    @torch.no_grad()
    def rescale(self) -> None:
        for layer in self.layers:
            layer.tied.weight.mul_(2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = functional.layer_norm(x + layer(x), (64,))
        return self.head(x, self.table.words)


def test_what_reads_a_weight_is_named() -> None:
    readers = weight_readers(Model())
    assert readers == {
        "table.words": "Head reads words.weight",
        **{
            f"layers.{i}.{name}": reason
            for i in range(2)
            for name, reason in (
                ("cast", "Block reads self.cast.weight"),
                ("inner.1", "Block reads self.inner[1].weight"),
                ("tied", "Model reads layer.tied.weight"),
            )
        },
    }


def test_children_that_are_read_stay_dense_and_the_rest_computes() -> None:
    model = Model()
    dense = copy.deepcopy(model)
    report = rt.quantize_model(model, "Q8_0")
    reasons = {entry.names[0]: entry.reason for entry in report.modules}
    assert reasons["layers.1.cast"] == "layers.1.cast is not only called: Block reads self.cast.weight"
    packed = {name for name, module in model.named_modules() if isinstance(module, rt.QuantizedLinear)}
    assert packed == {f"layers.{i}.{name}" for i in range(2) for name in ("called", "placed", "inner.0")}
    assert load_decoded(dense, model) == len(packed | {"table.positions"})
    ids = torch.randint(0, 50, (2, 7))
    for each in (model, dense):
        each.rescale()
    expected = dense(ids)
    assert (model(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_pattern_that_spells_the_name_packs_what_is_read() -> None:
    model = Model()
    report = rt.quantize_model(model, {"layers.0.c*": "Q8_0", "*.cast": "Q4_0", "*": "Q8_0"})
    formats = {entry.names[0]: entry.fmt for entry in report.modules}
    assert formats["layers.0.cast"] is None and formats["layers.1.cast"] == "Q4_0"
    assert formats["layers.0.called"] == "Q8_0" and formats["layers.0.inner.1"] is None
    model.layers[0](torch.randn(3, 64))
    with pytest.raises(rt.FormatError, match=r"torch\.uint8.*weight\.dtype.*exclude="):
        model.layers[1](torch.randn(3, 64))


def test_classes_without_source_are_taken_as_they_are() -> None:
    space: dict[str, type] = {"nn": nn}
    exec("class Typed(nn.Sequential):\n  def forward(self, x): return self[0](x) + self.a.weight", space)
    model = space["Typed"](nn.Linear(64, 64))
    assert weight_readers(model) == {}
    assert rt.quantize_model(model, "Q8_0").skipped == ()


class Casting(nn.Module):
    """Reads what a model holds that it is given."""

    def forward(self, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        for i in range(len(model.layers)):
            x = model.layers[i].wo(x.to(model.layers[i].wo.weight.dtype))
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"wo": nn.Linear(64, 64)}) for _ in "ab")
        self.cast = Casting()


def test_another_variable_may_hold_the_model_itself() -> None:
    reason = "Casting reads model.layers[i].wo.weight"
    for root, prefix in ((Stack(), ""), (nn.ModuleDict({"a": Stack()}), "a.")):
        assert weight_readers(root) == {f"{prefix}layers.{i}.wo": reason for i in range(2)}


class Anything:
    """Has each attribute that it is asked for, as proxies have."""

    def __getattr__(self, name: str) -> "Anything":
        return Anything()


def proxied(method):
    method.__wrapped__ = Anything()
    return method


class Odd(nn.Module):
    """Attributes without source of their own, which are passed by, and methods in wrappers."""

    anything = Anything()
    wrapped = proxied(lambda self, x: x @ self.cached.weight)
    half_a_line = {"a": """
x""", "b": lambda self, x: x @ self.cached.weight}["b"]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for name in ("cached", "lazy", "computed", "static"):
            setattr(self, name, nn.Linear(64, 64))

    @functools.cache  # noqa: B019
    def read_once(self) -> torch.Tensor:
        return self.computed.weight.sum()

    @functools.cached_property
    def sum(self) -> torch.Tensor:
        return self.lazy.weight.sum()

    @staticmethod
    def sum_of(odd: "Odd") -> torch.Tensor:
        return odd.static.weight.sum()


def test_attributes_of_any_kind_are_passed_by_or_seen() -> None:
    assert weight_readers(Odd()) == {
        "computed": "Odd reads self.computed.weight",
        "lazy": "Odd reads self.lazy.weight",
        "static": "Odd reads odd.static.weight",
    }
    assert [entry.names[0] for entry in rt.quantize_model(Odd(), "Q8_0").modules if entry.fmt] == ["cached"]


# --- torch's encoder layers, whose fast path takes the weights themselves


def encoder_layer(**options: object) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, **options)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
    return layer.eval()


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"norm_first": True}], ids=str)
def test_torch_encoder_layers_take_their_slow_path(options, context) -> None:
    model = encoder_layer(**options)
    dense = copy.deepcopy(model)
    report = rt.quantize_model(model, "Q8_0")
    assert [(entry.names[0], entry.fmt) for entry in report.modules] == [
        *(("self_attn.out_proj", None), ("linear1", "Q8_0"), ("linear2", "Q8_0"))
    ]
    assert "NonDynamicallyQuantizableLinear" in report.modules[0].reason
    assert model.self_attn.in_proj_weight.dtype == torch.float32
    load_decoded(dense, model)
    x = torch.randn(2, 5, 64)
    with context():
        y, expected = model(x), dense(x)
    # fp32 sums of up to 128 terms in another order
    assert expected.std() > 0.3 and (y - expected).abs().max() <= 1e-5


def test_torch_encoder_layers_under_autocast_and_compile() -> None:
    model = encoder_layer()
    dense = copy.deepcopy(model)
    rt.quantize_model(model, "Q8_0")
    load_decoded(dense, model)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        expected = dense(x)
        assert (torch.compile(model, fullgraph=True, backend="aot_eager")(x) - expected).abs().max() <= 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            # 8 bits of each of a few roundings
            assert (model(x) - expected).abs().max() <= 2**-5 * expected.abs().max()


def test_torch_encoders_with_padding_take_no_nested_tensors() -> None:
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True, dropout=0.0).eval()
    dense = copy.deepcopy(model)
    rt.quantize_model(model, "Q8_0")
    assert load_decoded(dense, model) == 8
    for each in (model, copy.deepcopy(model)):
        x, target = torch.randn(2, 5, 64), torch.randn(2, 3, 64)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            for options in ({}, {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}):
                y, expected = each(x, target, **options), dense(x, target, **options)
                assert (y - expected).abs().max() <= 1e-4


def test_a_packed_linear_put_there_by_hand_needs_the_documented_call() -> None:
    model = encoder_layer()
    dense = copy.deepcopy(model)
    model.linear1 = rt.QuantizedLinear.from_linear(model.linear1, "Q8_0")
    load_decoded(dense, model)
    leave_fast_paths(model)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert (model(x) - dense(x)).abs().max() <= 1e-5
