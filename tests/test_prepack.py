"""prepack and unpack: the same numbers, canonical state dicts, shared weights stay shared."""

import copy
import pickle

import pytest
import torch
from cases import random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch.errors import FormatError


def model():
    table = rt.QuantizedEmbedding.from_blocks(random_blocks("Q6_K", 7, 512), 512, "Q6_K")
    linear = rt.QuantizedLinear.from_blocks(random_blocks("Q8_0", 9, 512), 512, "Q8_0")
    head = rt.QuantizedLinear.from_blocks(random_blocks("Q6_K", 7, 512), 512, "Q6_K")
    head.weight = table.weight
    return nn.ModuleDict({"table": table, "linear": linear, "head": head})


def test_the_bytes_move_and_come_back():
    m = model()
    before = {name: value.clone() for name, value in m.state_dict().items()}
    rt.prepack(m, "planar")
    assert [x.layout for x in m.values()] == ["planar"] * 3 and not list(m.parameters())
    assert not torch.equal(m["linear"].packed, before["linear.weight"])
    assert m["table"].packed is m["head"].packed
    assert m["linear"].memory_bytes == before["linear.weight"].nbytes
    state = m.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert state["table.weight"].data_ptr() == state["head.weight"].data_ptr()
    rt.unpack(m)
    assert all(torch.equal(value, before[name]) for name, value in m.state_dict().items())
    assert m["table"].weight is m["head"].weight and not list(m.buffers())


def test_loading_packs_and_a_later_state_dict_has_the_new_bytes():
    m = model()
    rt.prepack(m, "planar")
    first = m.state_dict()
    other = {name: torch.randint(0, 256, value.shape, dtype=torch.uint8) for name, value in first.items()}
    other["head.weight"] = other["table.weight"]
    m.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in m.state_dict().items())
    with pytest.raises(RuntimeError, match=r"linear\.weight"):
        m.load_state_dict({name: value for name, value in other.items() if name != "linear.weight"})
    with pytest.raises(RuntimeError, match="expected"):
        m.load_state_dict(other | {"linear.weight": other["linear.weight"][:3]})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_saved_model_are_apart_and_tied_among_themselves(duplicate):
    m = model()
    rt.prepack(m, "planar")
    first = m.state_dict()
    other = duplicate(m)
    assert other["table"].packed is other["head"].packed is not m["head"].packed
    state = other.state_dict()
    assert state["table.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert state["table.weight"].data_ptr() != first["table.weight"].data_ptr()
    assert all(torch.equal(state[name], first[name]) for name in first)


def test_a_state_dict_of_packed_modules_belongs_to_the_caller():
    m = model()
    rt.prepack(m, "planar")
    state = m.state_dict()
    expected = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.zero_()
    plain = {}
    for again in (m.state_dict(), m.state_dict(destination=plain)):
        assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_modules_that_no_longer_share_are_saved_apart():
    m = model()
    rt.prepack(m, "planar")
    other = torch.randint(0, 256, m["table"].packed.shape, dtype=torch.uint8)
    m["head"]._apply(torch.clone)
    m["head"].load_state_dict({"weight": other})
    state = m.state_dict()
    assert torch.equal(state["head.weight"], other) and not torch.equal(state["table.weight"], other)


def test_packed_modules_on_meta_take_a_state_dict_by_assignment_only():
    m = model()
    state = {name: value.clone() for name, value in m.state_dict().items()}
    with torch.device("meta"):
        empty = nn.ModuleDict(
            {
                "table": rt.QuantizedEmbedding(7, 512, fmt="Q6_K"),
                "linear": rt.QuantizedLinear(512, 9, bias=False, fmt="Q8_0"),
                "head": rt.QuantizedLinear(512, 7, bias=False, fmt="Q6_K"),
            }
        )
    rt.prepack(empty, "planar")
    with pytest.raises(RuntimeError, match=r"linear\.weight: .* on meta .*assign=True"):
        empty.load_state_dict(state)
    state["head.weight"] = state["head.weight"] ^ 255
    empty.load_state_dict(state, assign=True)
    assert all(torch.equal(value, state[name]) for name, value in empty.state_dict().items())
    assert not any(buffer.is_meta for buffer in empty.buffers())


def test_auto_leaves_cpu_weights_alone_and_the_cpu_says_what_to_do():
    m = model()
    x = torch.randn(2, 512)
    expected = m["linear"](x)
    rt.prepack(m)
    assert m["linear"].layout == "ggml"
    rt.prepack(m, "planar")
    with pytest.raises(FormatError, match=r"rt\.unpack"):
        m["linear"](x)
    rt.unpack(m)
    assert torch.equal(m["linear"](x), expected)
    with pytest.raises(FormatError, match="unknown layout"):
        rt.prepack(m, "wide")


def test_a_weight_put_on_a_packed_module_is_refused():
    m = model()
    blocks = m["linear"].weight.detach().clone()
    rt.prepack(m, "planar")
    m["linear"].weight = nn.Parameter(blocks, requires_grad=False)
    with pytest.raises(FormatError, match="a weight was set"):
        m["linear"](torch.randn(512))


@pytest.mark.gpu
def test_on_the_gpu_auto_packs_what_pays_and_changes_no_bit():
    m = model().to("cuda")
    x = torch.randn(3, 512, device="cuda")
    ids = torch.tensor([6, 2], device="cuda")
    expected = m["linear"](x), m["head"](x), m["table"](ids)
    rt.prepack(m)
    assert m["linear"].layout == m["head"].layout == "planar"
    found = m["linear"](x), m["head"](x), m["table"](ids)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
