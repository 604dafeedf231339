"""quantize_model where a weight is also a plain parameter elsewhere: it stays dense, and one with its tie."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import realizar_torch as rt


class Bias(nn.Module):
    """Any class may hold a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[0]


class Model(nn.Module):
    """The root, another module, a list and a norm that has a linear in it hold weights beside the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight
        self.words = self.embed.weight
        self.first = nn.Linear(64, 64)
        self.bias = Bias(self.first.weight)
        self.second = nn.Linear(64, 64)
        self.rows = nn.ParameterList([self.second.weight])
        self.third = nn.Linear(64, 64)
        self.fused = rt.FusedLayerNormLinear(64, 64)
        self.fused.weight = self.third.weight
        self.free = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.third(self.bias(self.first(self.free(self.embed(ids))))) @ self.rows[0]
        return self.head(self.fused(self.second(x))) + functional.linear(x, self.words)


def test_a_weight_that_is_a_parameter_elsewhere_stays_dense_with_its_tie() -> None:
    model = Model()
    dense = copy.deepcopy(model)
    report = rt.quantize_model(model, "Q8_0", exclude=())
    words = "the parameter {} is the same weight, and would not be packed"
    assert {entry.names: entry.reason for entry in report.skipped} == {
        ("embed", "head"): words.format("words"),
        ("first",): words.format("bias.table"),
        ("second",): words.format("rows.0"),
        ("third",): words.format("fused.weight"),
    }
    assert type(model.free) is rt.QuantizedLinear
    assert model.words is model.embed.weight is model.head.weight
    assert model.bias.table is model.first.weight and model.fused.weight is model.third.weight
    dense.free.weight.data = model.free.dequantize()
    ids = torch.randint(0, 50, (2, 7))
    expected = dense(ids)
    # sums of 64 fp32 terms in another order, through six layers
    assert expected.std() > 0.5 and (model(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("plan", ["Q8_0", {"*.lin": "Q8_0", "lin": "Q8_0"}], ids=str)
def test_no_pattern_cuts_the_tie(plan: object) -> None:
    """Unlike a weight whose module is read, which a pattern with the module's name packs."""
    model = nn.Module()
    model.inner = nn.ModuleDict({"lin": nn.Linear(64, 64)})
    model.lin = nn.Linear(64, 64)
    model.bias_table = model.inner["lin"].weight
    report = rt.quantize_model(model, plan)
    assert [(entry.names, entry.fmt) for entry in report.modules] == [
        (("inner.lin",), None),
        (("lin",), "Q8_0"),
    ]
    assert model.inner["lin"].weight is model.bias_table


def test_a_module_under_two_names_is_no_other_holder() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)))
    model.append(model[0])
    (entry,) = rt.quantize_model(model, "Q8_0").modules
    assert entry.names == ("0.0", "1.0") and entry.fmt == "Q8_0"
