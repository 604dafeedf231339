"""QuantizedLinear and QuantizedEmbedding: values, state dicts, casts, moves, surgery."""

import copy
import io
import pickle

import pytest
import torch
from cases import PACKED, assert_within, float_tolerance, int8_tolerance, random_activations, random_blocks
from torch import nn

import realizar_torch as rt
from realizar_torch import reference
from realizar_torch.formats import get_format
from realizar_torch.nn.attention import Attention, AttentionInputs
from realizar_torch.nn.experts import QuantizedExperts
from realizar_torch.nn.mlp import GatedMLP
from realizar_torch.nn.norm import RMSNorm


def _linear(fmt: str = "Q4_K", rows: int = 33, columns: int = 300, **kwargs) -> rt.QuantizedLinear:
    bias = torch.randn(rows)
    return rt.QuantizedLinear.from_blocks(random_blocks(fmt, rows, columns), columns, fmt, bias, **kwargs)


def _embedding(fmt: str = "Q8_0", **kwargs) -> rt.QuantizedEmbedding:
    return rt.QuantizedEmbedding.from_blocks(random_blocks(fmt, 20, 300), 300, fmt, **kwargs)


# --- QuantizedLinear


@pytest.mark.parametrize("fmt", PACKED)
def test_linear_equals_the_dense_layer(fmt: str) -> None:
    module, x = _linear(fmt), random_activations(2, 5, 300)
    dense = module.to_linear(torch.float64)
    decoded = module.dequantize()
    assert torch.equal(decoded, reference.dequantize(module.weight, fmt, 300))
    assert_within(module(x), dense(x.double()), float_tolerance(x, decoded) + 1e-6)
    module.activations = "int8"
    tolerance = int8_tolerance(x, decoded) + float_tolerance(x, decoded) + 1e-6
    assert_within(module(x), dense(x.double()), tolerance)


def test_linear_without_bias_takes_shared_activations() -> None:
    module = rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 9, 300), 300, "Q4_K", activations="int8")
    x = random_activations(2, 300)
    assert module.bias is None
    assert module.padded_features == 512
    assert torch.equal(module(rt.ops.quantize_activations(x, "Q4_K")), module(x))


def test_new_linear_is_zero_until_loaded() -> None:
    module = rt.QuantizedLinear(300, 7)
    spec = get_format("Q4_K")
    assert (module.fmt, module.weight.dtype) == ("Q4_K", torch.uint8)
    assert module.weight.shape == (7, spec.row_bytes(300))
    assert not module.weight.requires_grad
    assert module.bias.requires_grad
    assert module(torch.randn(2, 300)).count_nonzero() == 0


def test_from_blocks_copies_nothing() -> None:
    blocks, bias = random_blocks("Q5_K", 4, 256), torch.randn(4)
    module = rt.QuantizedLinear.from_blocks(blocks, 256, "Q5_K", bias)
    assert module.weight.data_ptr() == blocks.data_ptr()
    assert module.bias.data_ptr() == bias.data_ptr()
    assert module.memory_bytes == blocks.numel() + 16


def test_to_linear_is_trainable_and_independent() -> None:
    module = _linear()
    dense = module.to_linear(torch.bfloat16)
    assert dense.weight.dtype == dense.bias.dtype == torch.bfloat16
    assert dense.weight.requires_grad
    before = module.bias.clone()
    dense.bias.data.zero_()
    assert torch.equal(module.bias, before)


def test_extra_repr_names_format_layout_and_bytes() -> None:
    assert repr(_linear()) == (
        "QuantizedLinear(in_features=300, out_features=33, bias=True, activations=float, fmt=Q4_K, "
        "layout=ggml, bytes=9636)"
    )
    embedding = _embedding()
    rt.prepack(embedding, "planar")
    assert repr(embedding) == (
        "QuantizedEmbedding(20, 300, dtype=torch.float32, fmt=Q8_0, layout=planar, bytes=6800)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rt.QuantizedLinear(0, 4), "in_features=0, out_features=4; both must be at least 1"),
        (lambda: rt.QuantizedLinear(4, 0), "in_features=4, out_features=0"),
        (lambda: rt.QuantizedLinear(300.0, 4), r"in_features is 300\.0, a float; expected an int"),
        (lambda: rt.QuantizedLinear(4, "7"), "out_features is '7', a str; expected an int"),
        (lambda: rt.QuantizedEmbedding(20.0, 4, 3), r"out_features is 20\.0, a float"),
        (lambda: rt.QuantizedLinear(4, 4, fmt="Q4_Z"), "unknown format 'Q4_Z'"),
        (lambda: rt.QuantizedLinear(4, 4, fmt="F16"), "plain float format"),
        (lambda: rt.QuantizedLinear(4, 4, activations="int4"), "activations is 'int4'"),
        (lambda: rt.QuantizedLinear.from_blocks(torch.zeros(2, 9), 256, "Q4_K"), "weight is torch.float32"),
        (
            lambda: rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 2, 256), 257, "Q4_K"),
            "257 weights are 2 Q4_K blocks",
        ),
        (
            lambda: rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 2, 256), 256, "Q4_K", torch.ones(3)),
            r"bias is torch.float32 \[3\], .*\[2\]",
        ),
        (lambda: rt.QuantizedEmbedding(0, 4), "out_features=0"),
        (lambda: rt.QuantizedEmbedding(4, 4, padding_idx=4), "padding_idx 4 is outside the table of 4 rows"),
        (lambda: _linear()(torch.ones(2, 299)), "expected last dimension 300"),
        (lambda: _linear()(torch.ones(2, 300).long()), "input is torch.int64"),
        (lambda: _embedding()(torch.tensor([20])), "id 20 is outside the table of 20 rows"),
        (
            lambda: rt.QuantizedLinear(300, 4, device="meta")(torch.ones(300)),
            "weight is on meta.*not been loaded",
        ),
        (lambda: RMSNorm(0), "a norm of 0 features"),
        (lambda: RMSNorm(8)(torch.ones(2, 9)), "expected last dimension 8"),
    ],
)
def test_wrong_arguments_are_refused(make, message: str) -> None:
    with pytest.raises(rt.FormatError, match=message):
        make()


# --- QuantizedEmbedding


@pytest.mark.parametrize("fmt", PACKED)
def test_embedding_rows(fmt: str) -> None:
    module = _embedding(fmt)
    ids = torch.tensor([[0, 1, 19], [7, 7, 0]])
    assert torch.equal(module(ids), reference.dequantize(module.weight, fmt, 300)[ids])
    assert module(torch.zeros(0, dtype=torch.int64)).shape == (0, 300)
    assert module.memory_bytes == module.weight.numel()


@pytest.mark.parametrize("padding_idx", [None, 0, 19, -1, -20])
def test_negative_padding_counts_from_the_end(padding_idx: int | None) -> None:
    assert _embedding(padding_idx=padding_idx).padding_idx == nn.Embedding(20, 1, padding_idx).padding_idx


def test_embedding_dtype_follows_the_module() -> None:
    module, ids = _embedding(dtype=torch.bfloat16), torch.tensor([3])
    assert module(ids).dtype == torch.bfloat16
    for cast, dtype in (("half", torch.float16), ("double", torch.float64), ("float", torch.float32)):
        assert getattr(nn.Sequential(module), cast)()(ids).dtype == dtype
    assert module.to(torch.bfloat16).to("cpu")(ids).dtype == torch.bfloat16


def test_tied_embedding_and_head_are_one_tensor() -> None:
    embedding = _embedding()
    head = rt.QuantizedLinear(300, 20, bias=False, fmt="Q8_0")
    head.weight = embedding.weight
    model = nn.ModuleDict({"embed": embedding, "head": head})
    assert len(list(model.parameters())) == 1
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    hidden = model["embed"](torch.tensor([4, 5]))
    expected = hidden.double() @ embedding.dequantize(torch.float64).T
    assert_within(model["head"](hidden), expected, float_tolerance(hidden, embedding.dequantize()))


# --- casts, moves, state dicts


MODULES = {"linear": _linear, "embedding": _embedding}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_casts_and_moves_leave_the_bytes_alone(make) -> None:
    module = make()
    before = module.weight.clone()
    for change in (
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float32),
        lambda m: m.requires_grad_(False),
        lambda m: m.train().eval(),
    ):
        module = change(module)
        assert torch.equal(module.weight, before)
        assert module.weight.dtype == torch.uint8


def test_a_cast_that_destroys_bytes_is_named_at_the_next_call() -> None:
    for module, x in ((_linear(), torch.ones(300)), (_embedding(), torch.tensor([1]))):
        with pytest.raises(rt.FormatError, match=r"weight is torch.float16, .*module.type\(dtype\) casts"):
            module.type(torch.float16)(x)


def test_half_module_computes_in_its_dtype() -> None:
    module, x = _linear(), random_activations(3, 300)
    expected = module.to_linear(torch.float64)(x.half().double())
    y = module.half()(x.half())
    assert y.dtype == torch.float16
    tolerance = float_tolerance(x.half(), module.dequantize()) + 2**-9 * module.bias.double().abs()
    assert_within(y, expected, tolerance)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_through_a_file(make, assign: bool) -> None:
    module = make()
    file = io.BytesIO()
    torch.save(nn.Sequential(module).state_dict(), file)
    file.seek(0)
    device = "meta" if assign else "cpu"
    other = type(module)(300, 33, device=device) if make is _linear else type(module)(20, 300, device=device)
    nn.Sequential(other).load_state_dict(torch.load(file), assign=assign)
    assert torch.equal(other.weight, module.weight)
    assert not other.weight.requires_grad
    x = torch.ones(2, 300) if make is _linear else torch.tensor([1, 2])
    assert torch.equal(other(x), module(x))


def test_state_dict_of_another_format_is_refused() -> None:
    """Q4_0 and Q4_K rows of 256 weights have the same size: only the name tells them apart."""
    state = nn.Sequential(_linear("Q4_0", 4, 256)).state_dict()
    target = nn.Sequential(rt.QuantizedLinear(256, 4, fmt="Q4_K"))
    with pytest.raises(rt.FormatError, match=r"0\.weight is stored as Q4_0, .* made for Q4_K; .*fmt='Q4_0'"):
        target.load_state_dict(state)
    embedding = rt.QuantizedEmbedding(20, 300, fmt="Q4_0")
    with pytest.raises(rt.FormatError, match="stored as Q8_0, but this module was made for Q4_0"):
        embedding.load_state_dict(_embedding().state_dict())


@pytest.mark.parametrize("width", [301, 512])
def test_state_dict_of_another_width_is_refused(width: int) -> None:
    """Rows of 300 and of 512 weights are two Q4_K blocks: only the number tells them apart."""
    linear, table = _linear(), _embedding("Q4_K")
    experts = QuantizedExperts(random_blocks("Q4_K", 6, 300).unflatten(0, (2, 3)), 300, "Q4_K")
    for module, other in (
        (linear, rt.QuantizedLinear(width, 33)),
        (table, rt.QuantizedEmbedding(20, width, fmt="Q4_K")),
        (experts, QuantizedExperts(experts.weight.data.clone(), width, "Q4_K")),
    ):
        with pytest.raises(rt.FormatError, match=rf"rows of 300 weights, .* made for {width}"):
            nn.Sequential(other).load_state_dict(nn.Sequential(module).state_dict())
        # as states were saved before widths travelled
        state = module.state_dict()
        del state._metadata[""]["columns"]
        other.load_state_dict(state)
        assert torch.equal(other.weight, module.weight)


def test_state_dict_without_metadata_loads_by_shape() -> None:
    module = _linear()
    other = rt.QuantizedLinear(300, 33)
    other.load_state_dict(dict(module.state_dict()))
    assert torch.equal(other.weight, module.weight)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        rt.QuantizedLinear(300, 33, fmt="Q6_K").load_state_dict(dict(module.state_dict()))


def test_float_weights_are_not_loaded_into_bytes() -> None:
    target = rt.QuantizedLinear(256, 4)
    state = {"weight": torch.randn(4, target.weight.shape[1]), "bias": torch.zeros(4)}
    with pytest.raises(rt.FormatError, match=r"weight is torch.float32, expected torch.uint8 bytes of Q4_K"):
        target.load_state_dict(state)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_copies_and_pickles_are_equal_and_apart(make) -> None:
    module = make()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.weight, module.weight)
        assert other.weight.data_ptr() != module.weight.data_ptr()
        assert (other.fmt, repr(other)) == (module.fmt, repr(module))


def test_meta_construction_and_skip_init() -> None:
    with torch.device("meta"):
        module = rt.QuantizedLinear(300, 4)
    assert module.weight.is_meta
    assert module.bias.is_meta
    module = torch.nn.utils.skip_init(rt.QuantizedLinear, 300, 4, fmt="Q8_0")
    assert module.weight.shape == (4, get_format("Q8_0").row_bytes(300))


# --- training around frozen bytes


def test_gradient_reaches_the_input_and_the_bias() -> None:
    module, x = _linear(), random_activations(2, 3, 300).requires_grad_()
    y = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected = grad.double() @ module.dequantize(torch.float64)
    torch.testing.assert_close(x.grad, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, grad.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert module.weight.grad is None


def test_requires_grad_on_bytes_raises_and_the_filter_works() -> None:
    model = nn.Sequential(_linear(), nn.Linear(33, 2))
    with pytest.raises(RuntimeError, match="floating point"):
        model.requires_grad_(True)
    trainable = [p for p in model.parameters() if p.is_floating_point()]
    optimizer, before = torch.optim.AdamW(trainable, lr=0.01), model[0].weight.clone()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.full((4, 300), 1e-4)) - 2).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert torch.equal(model[0].weight, before)


def test_hooks_and_containers() -> None:
    model = nn.ModuleDict({"a": _linear(rows=300), "b": nn.Sequential(_linear(rows=300), _linear())})
    seen = []
    model["b"][1].register_forward_hook(lambda m, args, output: seen.append(output.shape))
    model["b"](model["a"](torch.ones(2, 300)))
    assert seen == [(2, 33)]
    assert [n for n, p in model.named_parameters() if p.dtype == torch.uint8] == [
        "a.weight",
        "b.0.weight",
        "b.1.weight",
    ]


def test_modules_compile_without_graph_breaks() -> None:
    model = nn.Sequential(_embedding(), RMSNorm(300), _linear())
    ids = torch.tensor([1, 2, 3])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids), model(ids))


def _int8(rows: int, columns: int, bias: bool = True) -> rt.QuantizedLinear:
    blocks = random_blocks("Q4_K", rows, columns)
    shift = torch.randn(rows) if bias else None
    return rt.QuantizedLinear.from_blocks(blocks, columns, "Q4_K", shift, activations="int8")


@pytest.mark.parametrize("dynamic", [False, True])
def test_int8_layers_that_share_activations_compile(dynamic: bool) -> None:
    mlp = GatedMLP(_int8(64, 300), _int8(64, 300), _int8(300, 64), activation="silu")
    heads = _int8(64, 300), _int8(32, 300, bias=False), _int8(32, 300)
    attention = Attention(*heads, _int8(300, 64), head_dim=16, scale=0.25)
    for count in (1, 5):
        x = random_activations(2, count, 300)
        angles = torch.rand(2, 1, count, 8)
        inputs = AttentionInputs(angles.cos(), angles.sin(), None)
        with torch.no_grad():
            compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=dynamic)
            assert torch.equal(compiled(x), mlp(x))
            compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=dynamic)
            assert torch.equal(compiled(x, inputs), attention(x, inputs))


def test_a_bias_that_is_trained_gets_its_gradient_in_an_int8_mlp() -> None:
    mlp = GatedMLP(_int8(64, 300), _int8(64, 300), _int8(300, 64), activation="silu")
    mlp(random_activations(2, 300)).sum().backward()
    assert all(p.grad.count_nonzero() for p in mlp.parameters() if p.is_floating_point())
