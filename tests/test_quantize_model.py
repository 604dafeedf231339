"""quantize_model on models of torch and transformers: values, tying, plans, what is left dense and why."""

import re
import weakref

import pytest
import torch
from torch import nn

import realizar_torch as rt
from realizar_torch.reference import dequantize


class Small(nn.Module):
    """Every kind of module that counts, and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in "ab"
        )
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(self.norm(x))


def decoded(module: nn.Module, columns: int) -> torch.Tensor:
    return dequantize(module.weight, module.fmt, columns)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 7))


def test_the_model_computes_with_the_encoded_weights(ids):
    model, dense = Small(), Small()
    dense.load_state_dict(model.state_dict())
    report = rt.quantize_model(model, "Q8_0", exclude=())
    assert type(model.embed) is rt.QuantizedEmbedding and type(model.blocks[1][2]) is rt.QuantizedLinear
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            packed = model.get_submodule(name)
            assert torch.equal(packed.weight, rt.quantize(module.weight, "Q8_0")), name
            module.weight.data = decoded(packed, module.weight.shape[1])
    # sums of up to 96 fp32 terms of size 1 in another order
    assert (model(ids) - dense(ids)).abs().max() <= 1e-4
    assert model.embed.padding_idx == 3
    assert [module.names[0] for module in report.modules] == [
        *("embed", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "lm_head")
    ]
    assert report.bytes_before == sum(p.nbytes for n, p in dense.named_parameters() if p.ndim == 2)
    assert report.bytes_after == sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)


def test_gpt2_with_conv1d_and_a_tied_head():
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D

    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=32)
    model, dense = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        # a square c_proj that is not transposed has the right shape and wrong values (fault F-41)
        parameter.data.normal_(0, 0.2)
    dense.load_state_dict(model.state_dict())
    report = rt.quantize_model(model, "Q8_0", exclude=())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert ("transformer.wte", "lm_head") in [module.names for module in report.modules]
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    for name, module in dense.named_modules():
        packed = model.get_submodule(name)
        if isinstance(module, Conv1D):
            module.weight.data = decoded(packed, module.weight.shape[0]).t().contiguous()
        elif isinstance(module, nn.Embedding):
            module.weight.data = decoded(packed, 64)
    ids = torch.randint(0, 100, (2, 9))
    with torch.inference_mode():
        ours, expected = model(ids).logits, dense(ids).logits
    assert expected.std() > 0.5 and (ours - expected).abs().max() <= 2e-4


def test_a_tied_head_that_is_excluded_keeps_the_embedding_dense():
    model = Small()
    model.lm_head.weight = model.embed.weight
    report = rt.quantize_model(model, "Q8_0")
    assert model.lm_head.weight is model.embed.weight and type(model.embed) is nn.Embedding
    assert [(m.names, m.reason) for m in report.skipped] == [(("embed", "lm_head"), "lm_head is excluded")]


@pytest.mark.parametrize("path", ["model", "base_model.model", "lm_head.module"])
def test_a_head_inside_a_wrapper_stays_dense_as_one_at_the_top(path):
    """Adapters, data-parallel and other wrappers put names before it."""
    model = Small()
    for name in reversed(path.split(".")):
        model = nn.ModuleDict({name: model})
    report = rt.quantize_model(model, "Q8_0")
    assert [(m.names, m.reason) for m in report.skipped] == [
        ((f"{path}.lm_head",), f"{path}.lm_head is excluded")
    ]
    # one pattern that is asked for has to match
    with pytest.raises(rt.FormatError, match="'lm_head' matches nothing"):
        rt.quantize_model(nn.ModuleDict({"model": Small()}), "Q8_0", exclude="lm_head")


def test_a_weight_that_is_read_in_two_directions_stays_dense():
    """A square one, so that no shape would tell."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Linear(64, 64, bias=False), Conv1D(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    report = rt.quantize_model(model, "Q8_0")
    assert [(m.names, m.reason) for m in report.skipped] == [
        (("0", "1"), "shared by modules that read it in two directions")
    ]
    assert type(model[2]) is rt.QuantizedLinear and model[1].weight is model[0].weight


def test_a_module_under_two_names_stays_one():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1] = model[0]
    (entry,) = rt.quantize_model(model, "Q4_0").modules
    assert model[0] is model[1] and entry.names == ("0", "1") and entry.fmt == "Q4_0"


def test_a_plan_takes_the_first_pattern_that_matches():
    model = Small()
    plan = {"blocks.1.*": "Q8_0", "blocks.*.2": "Q5_0", "embed": "Q4_0"}
    report = rt.quantize_model(model, plan)
    formats = {module.names[0]: module.fmt for module in report.modules}
    assert formats == {
        "embed": "Q4_0",
        "blocks.0.0": None,
        "blocks.0.2": "Q5_0",
        "blocks.1.0": "Q8_0",
        "blocks.1.2": "Q8_0",
        "lm_head": None,
    }
    reasons = {module.names[0]: module.reason for module in report.skipped}
    assert reasons == {"blocks.0.0": "no pattern matches blocks.0.0", "lm_head": "lm_head is excluded"}
    assert "blocks.1.0: 24576 -> 6528 bytes (Q8_0)" in str(report)
    assert "blocks.0.0: 24576 -> 24576 bytes (dense, no pattern matches blocks.0.0)" in str(report)


@pytest.mark.parametrize(
    ("plan", "exclude", "words"),
    [
        ({"block.*": "Q8_0"}, (), "'block.*' matches nothing; names are like embed, blocks.0.0"),
        ({"blocks.*": "Q8_0", "norm": "Q8_0"}, (), "'norm' matches nothing"),
        ("Q8_0", ("head",), "'head' matches nothing"),
        ("Q9_0", (), "unknown format 'Q9_0'"),
        ("BF16", (), "plain float"),
        ({"*": "Q9_0"}, (), "unknown format"),
        (["Q8_0"], (), "expected a format or a dict"),
        ("Q8_0", None, "exclude is None; expected a name or pattern, or a sequence of them"),
        ("Q8_0", 5, "exclude is 5; expected a name or pattern"),
        ("Q8_0", ("lm_head", 1), "exclude is ('lm_head', 1); expected a name or pattern"),
        ("Q8_0", "head", "'head' matches nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_changes(plan, exclude, words):
    model = Small()
    with pytest.raises(rt.FormatError, match=re.escape(words)):
        rt.quantize_model(model, plan, exclude=exclude)
    assert type(model.embed) is nn.Embedding


def test_one_weight_in_two_formats_is_refused():
    model = Small()
    model.lm_head.weight = model.embed.weight
    with pytest.raises(rt.FormatError, match="embed and lm_head share a weight"):
        rt.quantize_model(model, {"embed": "Q8_0", "lm_head": "Q4_0"}, exclude=())
    with pytest.raises(rt.FormatError, match=r"no nn\.Linear"):
        rt.quantize_model(nn.LayerNorm(3), "Q8_0")


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_would_change_is_left_alone_and_reported():
    model = nn.ModuleDict(
        {
            "subclass": Doubled(64, 64),
            "hooked": nn.Linear(64, 64),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "small": nn.Linear(3, 64),
            "renormed": nn.Embedding(10, 64, max_norm=1.0),
            "meta": nn.Linear(64, 64, device="meta"),
            "attention": nn.MultiheadAttention(64, 4),
            "good": nn.Linear(64, 64),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    x = torch.randn(2, 64)
    before = {name: model[name](x) for name in ("subclass", "hooked", "parametrized")}
    report = rt.quantize_model(model, "Q8_0")
    reasons = {module.names[0]: module.reason for module in report.modules}
    assert reasons.pop("good") is None
    for name, words in (
        ("subclass", "Doubled"),
        ("hooked", "hooks"),
        ("parametrized", "Parametrized|parametrizations"),
        ("small", "too small: 3 columns are 34 bytes"),
        ("renormed", "max_norm"),
        ("meta", "meta"),
        ("attention.out_proj", "NonDynamicallyQuantizableLinear"),
    ):
        assert any(word in reasons[name] for word in words.split("|")), (name, reasons[name])
    assert all(torch.equal(model[name](x), y) for name, y in before.items())
    model["attention"](x, x, x)


def test_rows_that_are_no_whole_blocks_are_padded():
    """As the module does: 300 columns are two blocks of 256."""
    model = nn.Sequential(nn.Linear(300, 40).to(torch.bfloat16))
    weight = model[0].weight.detach().clone()
    rt.quantize_model(model, "Q4_K", activations="int8")
    assert model[0].in_features == 300 and model[0].activations == "int8"
    assert torch.equal(model[0].weight, rt.quantize(weight, "Q4_K"))
    assert model[0](torch.randn(2, 300, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_values_no_block_can_hold_name_their_module():
    model = Small()
    model.blocks[1][0].weight.data[5, 6] = torch.nan
    with pytest.raises(rt.FormatError, match=r"blocks\.1\.0: weight\[5, 6\]"):
        rt.quantize_model(model, "Q8_0")


@pytest.mark.parametrize("training", [True, False])
def test_progress_mode_and_gradients(training):
    model = Small().train(training)
    seen: list[tuple[int, int]] = []
    rt.quantize_model(model, "Q8_0", progress=lambda done, count: seen.append((done, count)))
    assert seen == [(n, 6) for n in range(1, 7)]
    assert all(module.training == training for module in model.modules())
    assert model.blocks[0][0].bias.requires_grad
    model(torch.randint(0, 50, (1, 4))).sum().backward()
    assert model.blocks[0][0].bias.grad.abs().sum() > 0


def test_dense_weights_are_freed_one_by_one():
    model = Small()
    dense = [weakref.ref(p) for name, p in model.named_parameters() if p.ndim == 2 and "norm" not in name]
    alive: list[int] = []
    rt.quantize_model(
        model, "Q8_0", progress=lambda *_: alive.append(sum(ref() is not None for ref in dense))
    )
    # the last one, lm_head, is excluded
    assert alive == [5, 4, 3, 2, 1, 1]


def test_what_is_no_model_or_packed_already_is_told():
    for module in (nn.Linear(64, 64), nn.Embedding(64, 64)):
        with pytest.raises(rt.FormatError, match=r"is one (Linear|Embedding).*from_linear"):
            rt.quantize_model(module, "Q8_0")
    model = nn.Sequential(nn.Linear(64, 64))
    rt.quantize_model(model, "Q8_0")
    for packed in (model, model[0]):
        with pytest.raises(rt.FormatError, match="quantized already"):
            rt.quantize_model(packed, "Q8_0")


def test_a_loaded_model_is_quantized_saved_and_loaded(tmp_path):
    from hf_directories import write_hf_directory

    write_hf_directory(tmp_path / "hf", tie_word_embeddings=True)
    model, tokenizer = rt.load(tmp_path / "hf", activations="float")
    rt.quantize_model(model, {"embed_tokens": "Q8_0", "lm_head": "Q8_0", "*": "Q5_1"}, exclude=())
    rt.save(model, tmp_path / "saved")
    again, _ = rt.load(tmp_path / "saved", activations="float")
    assert again.lm_head.weight is again.embed_tokens.weight
    ids = torch.tensor([tokenizer.encode("the cat and the hat")])
    assert torch.equal(model(ids).logits, again(ids).logits)
