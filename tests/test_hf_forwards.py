"""Projections of transformers' modules that share an input: the same numbers in fewer products."""

import ast
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_hf_modelling import MODEL_TYPES, modelling_file
from test_hf_models import KNOWN, Requantized
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP

import realizar_torch as rt
from realizar_torch.hf import forwards
from realizar_torch.hf.extended import Extended
from realizar_torch.hf.loading import load_model

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
# the heads' own norms are matrices, which Requantized would pack
NAMES = [name for name in KNOWN if name not in ("command-r-norms", "stablelm-parallel")]
# architectures whose MLPs have another form, and whose projections of q, k and v are one already
PLAIN = {"starcoder2", "phi2", "gpt2", "gptneox", "gptneox-sequential", "falcon", "falcon-groups", "phi3"}
FUSED = PLAIN - {"starcoder2", "phi2"} | {"phi3-long"}


def model_of(name: str, activations: str = "int8", device: str = "cpu") -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager", "device_map": device}
    return load_model(Requantized(name, packed=True), activations=activations, **options)


def extended(model: nn.Module, kind: type) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def as_transformers_has_it(model: nn.Module) -> nn.Module:
    for module in extended(model, Extended):
        module.__class__ = type(module).__bases__[1]
    return model


def dispatches(run: Any) -> dict[str, int]:
    with rt.record_dispatch() as metrics:
        run()
    names = ("linears", "gated_linear", "linear", "quantize_activations")
    return {name: count for name in names if (count := metrics.summary(name).count)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_every_architecture_shares_what_it_can(name: str, activations: str, device: str) -> None:
    model, ids = model_of(name, activations, device), IDS.to(device)
    layers = model.config.num_hidden_layers
    mlps, attentions = (extended(model, kind) for kind in (forwards._GatedMLP, forwards._Attention))
    assert len(mlps) == (0 if name in PLAIN | {"phi3-long"} else layers)
    assert len(attentions) == (0 if name in FUSED else layers)
    logits, found = model(ids).logits, dispatches(lambda: model(ids))
    assert found.get("gated_linear", 0) == sum(mlp.gate_proj.bias is None for mlp in mlps)
    assert found.get("linears", 0) == (len(attentions) if activations == "int8" else 0)
    expected = as_transformers_has_it(model)(ids).logits
    if device == "cpu":
        assert torch.equal(logits, expected)
    else:
        # sums of a launch in another order, and gates that are not rounded: int8 values move by steps
        close = 2e-2 if activations == "int8" else 1e-4
        assert (logits - expected).abs().max() <= close * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_compiled_layer_has_four_products(device: str) -> None:
    """No graph breaks, and what is compiled is what runs."""
    model, ids, graphs = model_of("qwen3", device=device), IDS.to(device), []
    expected = model(ids).logits

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    assert torch.equal(compiled(ids).logits, expected)
    (targets,) = graphs
    counts = {
        name: targets.count(f"realizar_torch.{name}.default")
        for name in ("linears", "gated_linear", "linear")
    }
    layers = model.config.num_hidden_layers
    assert counts == {"linears": layers, "gated_linear": layers, "linear": 2 * layers + 1}


@torch.inference_mode()
def test_a_model_packed_in_place_shares_its_inputs_when_asked_to() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    rt.quantize_model(model, "Q4_0", activations="int8")
    expected, apart = model(IDS).logits, dispatches(lambda: model(IDS))
    rt.hf.share_inputs(model)
    assert torch.equal(model(IDS).logits, expected)
    assert apart == {"linear": 14}
    assert dispatches(lambda: model(IDS)) == {"linears": 2, "gated_linear": 2, "linear": 4}


def test_modules_are_those_of_transformers() -> None:
    model = model_of("qwen3")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    names, size = set(model.state_dict()), model.get_memory_footprint()
    assert isinstance(mlp, forwards._GatedMLP) and isinstance(attention, forwards._Attention)
    kinds = [type(mlp), type(attention)]
    as_transformers_has_it(model)
    assert names == set(model.state_dict()) and size == model.get_memory_footprint()
    for kind, module in zip(kinds, (mlp, attention), strict=True):
        assert issubclass(kind, type(module))
        assert (kind.__name__, kind.__module__) == (type(module).__name__, type(module).__module__)


COPIES = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "to": lambda model, _: model.to("cpu", torch.float64).to(torch.float32),
}


def _saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("surgery", [*COPIES.values(), _saved], ids=[*COPIES, "save_pretrained"])
@torch.inference_mode()
def test_copies_share_too(surgery: Any, tmp_path: Path) -> None:
    model = model_of("llama")
    expected, shared = model(IDS).logits, dispatches(lambda: model(IDS))
    again = surgery(model, tmp_path)
    assert torch.equal(again(IDS).logits, expected)
    assert dispatches(lambda: again(IDS)) == shared


@torch.inference_mode()
def test_a_class_that_extends_the_extended_one_is_copied_too() -> None:
    """As FSDP makes them, for one."""
    mlp = model_of("llama").model.layers[0].mlp
    mlp.__class__ = type("Extension", (type(mlp),), {})
    x = torch.randn(2, mlp.gate_proj.in_features)
    again = copy.deepcopy(mlp)
    assert type(again) is type(mlp) and torch.equal(again(x), mlp(x))


@torch.inference_mode()
def test_a_hooked_projection_is_called_as_ever() -> None:
    model, seen = model_of("llama"), []
    layers, expected = model.config.num_hidden_layers, model(IDS).logits
    handles = [
        model.get_submodule(f"model.layers.0.{name}").register_forward_hook(lambda *call: seen.append(call))
        for name in ("self_attn.k_proj", "mlp.up_proj")
    ]
    found = dispatches(lambda: model(IDS))
    assert len(seen) == 2 and all(type(call[0]) is rt.QuantizedLinear for call in seen)
    assert found["linears"] == found["gated_linear"] == layers - 1
    for handle in handles:
        handle.remove()
    assert dispatches(lambda: model(IDS))["linears"] == layers
    assert torch.equal(model(IDS).logits, expected)


@torch.inference_mode()
def test_a_hooked_activation_is_called_as_ever() -> None:
    model, seen = model_of("llama"), []
    expected = model(IDS).logits
    mlp = model.model.layers[0].mlp
    mlp.act_fn.register_forward_hook(
        lambda _, inputs, y: seen.append(torch.equal(y, mlp.act_fn.forward(*inputs)))
    )
    assert torch.equal(model(IDS).logits, expected) and seen == [True]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [LlamaMLP, LlamaAttention, type(ACT2FN["silu"])], ids=lambda k: k.__name__)
@torch.inference_mode()
def test_a_class_that_is_patched_after_loading_is_called(kind: Any, compiled: bool, monkeypatch) -> None:
    torch._dynamo.reset()
    model, own = model_of("llama"), kind.forward
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    before = run(IDS).logits

    def halved(self: nn.Module, *args: Any, **options: Any) -> Any:
        y = own(self, *args, **options)
        return (y[0] / 2, *y[1:]) if isinstance(y, tuple) else y / 2

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", halved)
        found = run(IDS).logits
        # what is made meanwhile calls it, too
        again, later = copy.deepcopy(model), model_of("llama")
        assert all(torch.equal(one(IDS).logits, found) for one in (again, later))
        expected = as_transformers_has_it(again)(IDS).logits
    assert torch.equal(found, expected) and not torch.allclose(found, before)
    assert torch.equal(run(IDS).logits, before)
    if not compiled:
        assert dispatches(lambda: model(IDS))["gated_linear"] == model.config.num_hidden_layers


@pytest.mark.parametrize("other", [nn.Hardswish(), nn.functional.hardswish], ids=["module", "function"])
@torch.inference_mode()
def test_another_activation_is_what_runs(other: Any) -> None:
    """Gates that no kernel knows are left to transformers."""
    model = model_of("llama")
    before = model(IDS).logits
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = other
    found = dispatches(lambda: model(IDS))
    assert found["gated_linear"] == model.config.num_hidden_layers - 1
    assert not torch.equal(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, as_transformers_has_it(model)(IDS).logits)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["o_proj"]], ids=str)
def test_adapters_on_a_part_of_them_train_as_they_did(targets: list[str]) -> None:
    gradients, losses = [], []
    for plain in (False, True):
        base = model_of("llama")
        if plain:
            as_transformers_has_it(base)
        torch.manual_seed(0)
        model = get_peft_model(base, rt.lora.packed(LoraConfig(r=2, target_modules=targets)))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert losses[0] == losses[1] and len(gradients[0]) > 0
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.count_nonzero() and torch.equal(ours, theirs)


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x, v: torch.func.grad(lambda x: (f(x) * v).sum())(x),
    "jvp": lambda f, x, v: torch.stack(torch.func.jvp(f, (x,), (v,))),
    "vmap": lambda f, x, v: torch.func.vmap(f)(torch.stack([x, v])),
}


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_pass_through(transform: Any, activations: str, part: str) -> None:
    model = model_of("llama", activations)
    module = getattr(model.model.layers[0], part)
    x, v = torch.randn(2, 1, 5, model.config.hidden_size)
    positions = model.model.rotary_emb(x, torch.arange(5)[None])

    def run(x: Tensor) -> Tensor:
        return (
            module(x) if part == "mlp" else module(x, position_embeddings=positions, attention_mask=None)[0]
        )

    assert isinstance(module, Extended)
    found = transform(run, x, v)
    as_transformers_has_it(model)
    assert found.count_nonzero() and torch.equal(found, transform(run, x, v))


class CrossAttention(nn.Module):
    """Keys and values of another input."""

    def __init__(self) -> None:
        super().__init__()
        blocks = rt.quantize(torch.randn(32, 32), "Q8_0")
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, rt.QuantizedLinear.from_blocks(blocks, 32, "Q8_0", activations="int8"))

    def forward(self, hidden_states: Tensor, other: Tensor) -> Tensor:
        return self.q_proj(hidden_states) + self.k_proj(other) * self.v_proj(other)


@torch.inference_mode()
def test_a_projection_of_something_else_is_made() -> None:
    module, x, other = nn.Sequential(CrossAttention()), torch.randn(2, 32), torch.randn(2, 32)
    expected = module[0](x, other)
    forwards.share_inputs(module)
    assert isinstance(module[0], forwards._Attention)
    assert torch.equal(module[0](hidden_states=x, other=other), expected)


class Keeping(CrossAttention):
    def forward(self, hidden_states: Tensor) -> Tensor:
        self.keys = self.k_proj(hidden_states)
        return self.q_proj(hidden_states) * self.keys + self.v_proj(hidden_states)


class Asking(Keeping):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("kind", [Keeping, Asking])
@torch.inference_mode()
def test_what_a_forward_sets_or_asks_for_is_the_modules_own(kind: type) -> None:
    module, x = nn.Sequential(kind()), torch.randn(2, 32)
    expected = module(x)
    keys = module[0].__dict__.pop("keys")
    forwards.share_inputs(module)
    assert isinstance(module[0], forwards._Attention) == (kind is Keeping)
    assert torch.equal(module(x), expected) and torch.equal(module[0].keys, keys)


class TwoInputs(CrossAttention):
    def forward(self, hidden_states: Tensor, key_value_states: Tensor) -> Tensor:
        return super().forward(hidden_states, key_value_states)


def test_an_attention_of_two_inputs_makes_no_keys_for_nothing() -> None:
    module = nn.Sequential(TwoInputs())
    forwards.share_inputs(module)
    assert type(module[0]) is TwoInputs


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = self.up_proj = self.down_proj = self.act_fn = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) / 2


class Refusing(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise ValueError("expected a tensor")
        return super().forward(x)


class Renamed(Dropping):
    """Its callers may say the name."""

    def forward(self, hidden_state: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


@pytest.mark.parametrize("kind", [Dropping, Refusing, Renamed])
def test_an_mlp_that_does_something_else_is_left_alone(kind: type[nn.Module]) -> None:
    module = nn.Sequential(kind())
    forwards.share_inputs(module)
    assert type(module[0]) is kind


@torch.inference_mode()
def test_a_forward_that_a_class_was_given_is_that_of_its_new_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return own(self, hidden_states, *args, **kwargs)

    expected, own, seen = model_of("llama")(IDS).logits, LlamaAttention.forward, []
    monkeypatch.setattr(LlamaAttention, "forward", patched)
    model = model_of("llama")
    assert torch.equal(model(IDS).logits, expected)
    assert len(seen) == model.config.num_hidden_layers


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_attentions_keep_nothing_and_ask_nobody_above_them(model_type: str) -> None:
    """Their forward gets a stand-in for the module, which super() refuses."""
    for owner in ast.walk(ast.parse(modelling_file(model_type).read_text(encoding="utf-8"))):
        if not isinstance(owner, ast.ClassDef) or "q_proj" not in ast.unparse(owner):
            continue
        for node in (node for f in owner.body if getattr(f, "name", "") == "forward" for node in ast.walk(f)):
            written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert not written, f"{owner.name} sets {ast.unparse(node)}"
            assert not (isinstance(node, ast.Name) and node.id == "super"), f"{owner.name} calls super"
