"""LoRA on a packed GPT-2, whose dense layers are Conv1D: adapters know that packed weights are [out, in]."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import realizar_torch as rt

IDS = torch.arange(12)[None]
CONFIG = GPT2Config(
    vocab_size=20, n_embd=64, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
)
# c_attn is [192, 64]; c_proj is square, so that a transposed update fits
TARGETS = ["attn.c_attn", "attn.c_proj"]
WARNING = r"fan_in_fan_out is True, but packed weights are \[out_features, in_features\]"

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}")


def _config(fan_in_fan_out: bool = True) -> LoraConfig:
    options = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False}
    return rt.lora.packed(LoraConfig(**options, fan_in_fan_out=fan_in_fan_out))


def _pair(*dense_too: str) -> tuple[GPT2LMHeadModel, GPT2LMHeadModel]:
    """A packed GPT-2, and one of Conv1D layers with the numbers that the packed one holds."""
    dense = GPT2LMHeadModel(CONFIG).eval()
    packed = copy.deepcopy(dense)
    rt.quantize_model(packed, "Q8_0", exclude=("lm_head", "*.wpe", *dense_too))
    for name, module in packed.named_modules():
        if isinstance(module, rt.QuantizedLinear):
            conv = dense.get_submodule(name)
            assert isinstance(conv, Conv1D)
            conv.weight.data = module.dequantize().T.contiguous()
    return packed, dense


def _assert_close(y: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def _layers(model: PeftModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "get_delta_weight")]


def test_the_config_is_corrected_with_a_warning_as_for_a_dense_linear_layer() -> None:
    config = _config()
    with pytest.warns(UserWarning, match=WARNING) as caught:
        model = get_peft_model(_pair()[0], config)
    assert len([w for w in caught if "packed weights" in str(w.message)]) == 1
    assert config.fan_in_fan_out is False
    for layer in _layers(model):
        delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
        assert torch.equal(layer.get_delta_weight("default"), delta)


# some layers dense: both kinds under one config, which peft changes at every Conv1D
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`")
@pytest.mark.parametrize("dense_too", [(), ("*.attn.c_proj",), ("*.c_attn",)], ids=str)
@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_merged_layers_compute_what_adapted_ones_did(
    fan_in_fan_out: bool, dense_too: tuple[str, ...]
) -> None:
    model = get_peft_model(_pair(*dense_too)[0], _config(fan_in_fan_out))
    expected = model(IDS).logits
    with model.disable_adapter():
        alone = model(IDS).logits
    assert (alone - expected).abs().max() > 0.1 * expected.abs().max()
    rt.lora.dequantize(model)
    _assert_close(model(IDS).logits, expected)
    model.merge_adapter()
    _assert_close(model(IDS).logits, expected)
    model.unmerge_adapter()
    _assert_close(model(IDS).logits, expected)
    _assert_close(model.merge_and_unload(safe_merge=True)(IDS).logits, expected)


def test_gradients_equal_those_of_the_dense_model() -> None:
    ours, theirs = (get_peft_model(base, _config()) for base in _pair())
    theirs.load_state_dict({n: p for n, p in ours.state_dict().items() if "lora_" in n}, strict=False)
    for model in (ours, theirs):
        model(IDS, labels=IDS).loss.backward()
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(trained) == 8
    for name, parameter in trained.items():
        scale = parameter.grad.abs().max().item()
        assert scale > 0
        found = ours.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`")
@pytest.mark.parametrize("trained_on", ["dense", "packed"])
def test_adapters_move_between_the_dense_and_the_packed_model(trained_on: str, tmp_path: Path) -> None:
    packed, dense = _pair()
    here, there = (dense, packed) if trained_on == "dense" else (packed, dense)
    model = get_peft_model(here, _config())
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["fan_in_fan_out"] is (trained_on == "dense")

    config = rt.lora.packed(LoraConfig.from_pretrained(tmp_path))
    loaded = PeftModel.from_pretrained(there, tmp_path, config=config)
    _assert_close(loaded(IDS).logits, expected)
    if trained_on == "dense":
        rt.lora.dequantize(loaded)
    _assert_close(loaded.merge_and_unload()(IDS).logits, expected)
