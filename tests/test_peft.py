"""LoRA on packed layers: the gradients of a dense reference, a falling loss, files, and honest merging."""

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from bounded import Bounded
from cases import PACKED, assert_within, random_activations, random_blocks
from packed_model import digest
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny_models import TINY, write_tiny_llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import realizar_torch as rt

COLUMNS = 300


def _base(fmt: str = "Q4_K", activations: str = "float") -> nn.Sequential:
    first, second = random_blocks(fmt, COLUMNS, COLUMNS), random_blocks(fmt, 7, COLUMNS, seed=1)
    linear = rt.QuantizedLinear.from_blocks
    return nn.Sequential(
        linear(first, COLUMNS, fmt, torch.randn(COLUMNS), activations=activations),
        nn.Tanh(),
        linear(second, COLUMNS, fmt, activations=activations),
    )


def _config(**options) -> LoraConfig:
    return rt.lora.packed(LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], **options))


def _shaken(model: PeftModel) -> PeftModel:
    """Adapters that change the output: peft starts B at zero."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_new_adapters_change_nothing_and_are_all_that_trains() -> None:
    base, x = _base(), random_activations(3, COLUMNS)
    expected = base(x)
    model = get_peft_model(base, _config())
    assert torch.equal(model(x), expected)
    assert len(_adapters(model)) == 4 and all("lora_" in name for name in _adapters(model))


@pytest.mark.parametrize("fmt", PACKED)
def test_gradients_equal_those_of_dense_layers(fmt: str) -> None:
    base, x = _base(fmt), random_activations(3, COLUMNS)
    # a saturated tanh passes no gradient on
    x /= base[0](x).std().detach()
    dense = nn.Sequential(base[0].to_linear(), nn.Tanh(), base[2].to_linear())
    ours = _shaken(get_peft_model(base, _config()))
    theirs = get_peft_model(dense, LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"]))
    theirs.load_state_dict(_adapters(ours), strict=False)
    expected = _exact_gradients(dense, _adapters(ours).values(), x)
    for model in (ours, theirs):
        model(x).square().mean().backward()
        for parameter, gradient in zip(_adapters(model).values(), expected, strict=True):
            assert gradient.error.max() < 1e-3 * gradient.value.abs().max()
            assert_within(parameter.grad, gradient.value, gradient.error)


def _exact_gradients(dense: nn.Sequential, adapters: Iterable[Tensor], x: Tensor) -> list[Bounded]:
    """Of the mean of ``y²``, by hand; ``y = (W + 2 B A) x + b`` of both layers, with a tanh between them."""
    w1, bias, w2, x = map(Bounded, (dense[0].weight, dense[0].bias, dense[2].weight, x))
    a1, b1, a2, b2 = map(Bounded, adapters)
    low1 = x @ a1.T
    t = (x @ w1.T + bias + low1 @ b1.T * 2.0).tanh()
    low2 = t @ a2.T
    y = t @ w2.T + low2 @ b2.T * 2.0
    dy = y * (2.0 / y.value.numel())
    dlow2 = dy @ b2 * 2.0
    dh = (dy @ w2 + dlow2 @ a2) * t.tanh_slope()
    dlow1 = dh @ b1 * 2.0
    return [dlow1.T @ x, dh.T @ low1 * 2.0, dlow2.T @ t, dy.T @ low2 * 2.0]


def test_autocast_trains_adapters_as_it_does_on_dense_layers() -> None:
    packed = _base()[0]
    ours, theirs = nn.Sequential(packed), nn.Sequential(packed.to_linear())
    config = LoraConfig(r=4, target_modules=["0"])
    ours, theirs = _shaken(get_peft_model(ours, rt.lora.packed(config))), get_peft_model(theirs, config)
    theirs.load_state_dict(_adapters(ours), strict=False)
    results = []
    for model in (ours, theirs):
        x = random_activations(3, COLUMNS).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(random_activations(3, COLUMNS, dtype=torch.bfloat16, seed=1))
        results.append((y, x.grad, [parameter.grad for parameter in _adapters(model).values()]))
    # of numbers alone that no base weight is in
    assert len(results[0][2]) == 2
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)
    # nn.Linear rounds its weight to bfloat16, too
    for found, expected in zip(results[0][:2], results[1][:2], strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_has_the_same_gradients(reentrant: bool) -> None:
    model = _shaken(get_peft_model(_base(), _config(lora_dropout=0.1))).train()
    x, gradients = random_activations(3, COLUMNS).requires_grad_(), []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.zero_grad()
        torch.manual_seed(0)
        run(x).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in _adapters(model).values()])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected) and found.count_nonzero()


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_training_lowers_the_loss_and_leaves_the_bytes(activations: str) -> None:
    base = _base(activations=activations)
    before, x, target = digest(base), random_activations(8, COLUMNS), torch.randn(8, 7)
    model = get_peft_model(base, _config(lora_dropout=0.05))
    start = model.eval()(x)
    goal = start.detach() + 0.1 * start.detach().abs().mean() * target
    optimizer = torch.optim.AdamW(_adapters(model).values(), lr=0.01)
    losses = []
    model.train()
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert list(digest(model).values()) == list(before.values())


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    base, x = _base(), random_activations(3, COLUMNS)
    model = _shaken(get_peft_model(copy.deepcopy(base), _config()))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 64 << 10
    config = rt.lora.packed(LoraConfig.from_pretrained(tmp_path))
    loaded = PeftModel.from_pretrained(base, tmp_path, config=config)
    assert torch.equal(loaded(x), model(x))
    with loaded.disable_adapter():
        assert not torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.unload()(x), _base_output(model, x))


def _base_output(model: PeftModel, x: Tensor) -> Tensor:
    with model.disable_adapter():
        return model(x)


def test_a_config_that_was_not_passed_through_packed_is_refused_by_peft() -> None:
    with pytest.raises(ValueError, match=r"QuantizedLinear.* is not supported"):
        get_peft_model(_base(), LoraConfig(r=4, target_modules=["0"]))


def test_all_linear_would_leave_packed_layers_out() -> None:
    with pytest.raises(rt.FormatError, match=r"dense layers only; .*r'\.\*_proj'"):
        rt.lora.packed(LoraConfig(target_modules="all-linear"))
    model = nn.ModuleDict({"a_proj": _base()[0], "b_proj": _base()[2], "c": _base()[0]})
    config = rt.lora.packed(LoraConfig(r=2, target_modules=r".*_proj"))
    assert len(_adapters(get_peft_model(model, config))) == 4


@pytest.mark.parametrize("config", [{}, IA3Config(target_modules=["0"], feedforward_modules=[])])
def test_other_configs_are_refused(config: object) -> None:
    with pytest.raises(rt.FormatError, match=rf"config is a {type(config).__name__}, expected a peft\.Lora"):
        rt.lora.packed(config)


class Embedded(nn.Module):
    """A table, a linear layer to adapt and a head; get_input_embeddings as transformers' models have it."""

    def __init__(self, dense: bool):
        super().__init__()
        self.table = nn.Embedding(7, COLUMNS)
        self.body, self.head = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, 7)
        rt.quantize_model(self, "Q8_0", exclude=("table", "head") if dense else ())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)))

    def get_input_embeddings(self) -> nn.Module:
        return self.table


WHOLE = [
    {"modules_to_save": ["head"]},
    {"trainable_token_indices": [1, 3]},
    {"trainable_token_indices": {"table": [1, 3]}},
]


@pytest.mark.parametrize("options", WHOLE, ids=str)
def test_modules_that_train_whole_must_be_dense(options: dict) -> None:
    config = LoraConfig(r=2, target_modules=["body"], **options)
    with pytest.raises(rt.FormatError, match=rf"{next(iter(options))} trains whole.*packed\(config, model\)"):
        rt.lora.packed(config)
    with pytest.raises(rt.FormatError, match=rf"{next(iter(options))} names (head|table), which is packed"):
        rt.lora.packed(config, Embedded(dense=False))
    base = Embedded(dense=True)
    model = get_peft_model(base, rt.lora.packed(config, base))
    model(torch.arange(7)).square().mean().backward()
    trained = _adapters(model)
    assert len(trained) > 2 and all(p.grad is not None for p in trained.values())


def test_bytes_in_every_layout_and_inside_other_modules_are_found() -> None:
    fused = rt.FusedLayerNormLinear(COLUMNS, (4, 5), fmt=("Q8_0", None))
    planar = _base("Q8_0")
    rt.prepack(planar, "planar")
    for head in (fused, planar):
        model = nn.ModuleDict({"body": _base()[0], "head": head})
        config = LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"])
        with pytest.raises(rt.FormatError, match="modules_to_save names head, which is packed"):
            rt.lora.packed(config, model)
        # peft finds modules by the ends of their names
        with pytest.raises(rt.FormatError, match=r"modules_to_save names inner\.head, which is packed"):
            rt.lora.packed(config, nn.ModuleDict({"inner": model}))


def test_a_list_of_tokens_is_about_the_table_named_as_peft_names_it() -> None:
    model = nn.ModuleDict({"embed_tokens": rt.QuantizedEmbedding(7, COLUMNS), "body": _base()[0]})
    config = LoraConfig(r=2, target_modules=["body"], trainable_token_indices=[1])
    with pytest.raises(rt.FormatError, match="trainable_token_indices names embed_tokens, which is packed"):
        rt.lora.packed(config, model)


def test_merging_is_refused_until_the_layers_are_dense() -> None:
    base, x = _base(), random_activations(3, COLUMNS)
    before = digest(base)
    model = _shaken(get_peft_model(base, _config()))
    expected = model(x)
    for merge in (
        model.merge_adapter,
        model.merge_and_unload,
        lambda: model.merge_and_unload(safe_merge=True),
    ):
        with pytest.raises(rt.FormatError, match=r"Q4_K blocks take no update.*lora\.dequantize"):
            merge()
    assert list(digest(model).values()) == list(before.values())
    assert torch.equal(model(x), expected)

    with pytest.raises(rt.FormatError, match=r"Tanh has no adapters on packed layers"):
        rt.lora.dequantize(nn.Tanh())
    rt.lora.dequantize(model)
    merged = model.merge_and_unload()
    assert [type(layer) for layer in merged] == [nn.Linear, nn.Tanh, nn.Linear]
    torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "orthogonal"}]
)
def test_what_needs_the_float_weight_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"variant combination|decomposes the float weight"):
        get_peft_model(_base(), _config(**options))


def test_adapted_models_can_be_prepacked_but_not_the_other_way_round() -> None:
    base = _base("Q8_0")
    rt.prepack(base, "planar")
    with pytest.raises(rt.FormatError, match=r"packed as 'planar'; call rt\.unpack"):
        get_peft_model(base, _config())
    rt.unpack(base)
    model = get_peft_model(base, _config())
    rt.prepack(model, "planar")
    assert model.base_model.model[0].base_layer.layout == "planar"


def test_mixed_precision_and_two_adapters() -> None:
    base, x = _base().bfloat16(), random_activations(3, COLUMNS, dtype=torch.bfloat16)
    model = get_peft_model(base, _config())
    model.add_adapter("second", _config())
    _shaken(model).eval()
    model.set_adapter("second")
    y = model(x)
    assert y.dtype == torch.bfloat16
    mixed = model(x, adapter_names=["default", "second", "__base__"])
    # peft rounds to bfloat16 in another order here
    torch.testing.assert_close(mixed[1], y[1], rtol=2**-6, atol=2**-6 * y.abs().max().item())
    assert (mixed[0] - y[0]).abs().max() > 2**-3 * y.abs().max()


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_2_SEQ_LM"])
def test_a_task_type_that_needs_transformers_is_told_what_to_do(task: str, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", sizes=TINY._replace(layers=1))
    base, _ = rt.load(path, device="cpu")
    assert not hasattr(base, "prepare_inputs_for_generation")
    config = rt.lora.packed(LoraConfig(r=4, target_modules=["q_proj"], task_type=task))
    words = "has no prepare_inputs_for_generation.*load the model again.*leave task_type None.*from_gguf"
    with pytest.raises(AttributeError, match=words):
        get_peft_model(base, config)
    base, _ = rt.load(path, device="cpu")
    assert base.norm is base.get_submodule("norm")
    with pytest.raises(AttributeError, match="has no attribute 'prepare'"):
        _ = base.prepare
    config.task_type = None
    assert type(get_peft_model(base, config)) is PeftModel


def test_a_whole_transformer_trains_and_compiles(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m.gguf", sizes=TINY._replace(layers=1))
    base, _ = rt.load(path, device="cpu")
    ids = torch.randint(0, 20, (2, 9))
    expected = base(ids).logits
    config = rt.lora.packed(LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))
    model = get_peft_model(base, config)
    assert torch.equal(model(input_ids=ids).logits, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        logits = run(input_ids=ids).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        grads.append([p.grad.clone() for p in _adapters(model).values()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert any(g.count_nonzero() for g in grads[0])
