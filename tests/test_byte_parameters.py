"""What training code does to all parameters of a model: packed bytes stay what they are, or it is refused."""

import pytest
import torch
from cases import random_blocks
from packed_model import ROWS, Cell, digest
from peft import prepare_model_for_kbit_training
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import realizar_torch as rt
from realizar_torch.nn.experts import QuantizedExperts

CELL = Cell("Q4_K", "cpu", "ggml")
FLOATS = ("linear.bias", "fused.layer_norm_weight", "fused.weight.2")


def shifted(model: nn.Module) -> nn.Module:
    """Every float parameter one more than before."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(1)
    return model


@pytest.mark.parametrize("layout", ["ggml", "planar"])
def test_the_documented_average_leaves_bytes_alone(layout: str) -> None:
    model = CELL.build(layout=layout)
    before, start = digest(model), {name: model.get_parameter(name).clone() for name in FLOATS}
    ema = get_ema_multi_avg_fn(0.9)
    average = AveragedModel(
        model,
        multi_avg_fn=lambda old, new, n: ema(old, new, n) if old[0].is_floating_point() else None,
    )
    for _ in range(3):
        average.update_parameters(shifted(model))
    assert digest(average.module) == digest(model) == before
    for name in FLOATS:
        # 1 at first, then a tenth of the way to 2 and to 3
        expected = start[name] + 0.9 * (0.9 * 1 + 0.1 * 2) + 0.1 * 3
        torch.testing.assert_close(average.module.get_parameter(name), expected)


def test_any_average_copies_what_is_prepacked() -> None:
    """Bytes in a buffer are no parameters."""
    linear = rt.QuantizedLinear.from_blocks(random_blocks("Q4_K", 33, 512), 512, "Q4_K", torch.randn(33))
    rt.prepack(linear, "planar")
    average = AveragedModel(linear, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for _ in range(4):
        average.update_parameters(linear)
    assert torch.equal(average.module.packed, linear.packed)


def test_packed_weights_are_not_pruned() -> None:
    blocks = random_blocks("Q8_0", 6, 64)
    linear = rt.QuantizedLinear.from_blocks(blocks, 64, "Q8_0")
    fused = rt.FusedLayerNormLinear.fuse(nn.LayerNorm(64), linear)
    for module in (linear, fused, QuantizedExperts(blocks.unflatten(0, (2, 3)), 64, "Q8_0")):
        for method in (prune.l1_unstructured, prune.random_unstructured):
            before = repr(module)
            with pytest.raises(rt.FormatError, match=r"packed bytes .*'weight_orig'.*to_linear"):
                method(module, "weight", amount=0.5)
            assert repr(module) == before and torch.equal(module.weight.flatten(0, -2), blocks)
    dense = rt.FusedLayerNormLinear(64, 6)
    prune.l1_unstructured(dense, "weight", amount=0.5)
    assert (dense.weight == 0).sum() == 6 * 64 // 2


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_weights_of_other_parts_are_refused_by_torch(change) -> None:
    linear = rt.QuantizedLinear(64, ROWS, fmt="Q8_0")
    with pytest.raises(RuntimeError):
        change(linear)


def test_the_loop_before_training_with_adapters_casts_floats_only() -> None:
    """F-56: peft casts all parameters that are half precision, and freezes all."""
    model = CELL.build().half()
    before = digest(model)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert digest(model) == before
    assert not any(parameter.requires_grad for parameter in model.parameters())
    kinds = {parameter.dtype for parameter in model.parameters()}
    assert kinds == {torch.float32, torch.uint8}


def test_a_loop_that_casts_bytes_is_named_at_the_next_call() -> None:
    model = CELL.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    with pytest.raises(rt.FormatError, match=r"weight is torch.float32, expected torch.uint8"):
        model(*CELL.inputs())


def test_parameters_count_bytes_and_leave_out_prepacked_ones() -> None:
    """F-60: what num_parameters adds up is bytes, and lacks what is prepacked; memory is the same."""
    plain, packed = CELL.build(), CELL.build(layout="planar")
    # the table's weight is the head's
    hidden = sum(m.weight.nbytes for m in (plain.table, plain.scaled, plain.experts, plain.linear))
    parameters = [sum(parameter.numel() for parameter in model.parameters()) for model in (plain, packed)]
    assert parameters[0] == parameters[1] + hidden
    for memory in (
        lambda model: sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        lambda model: model.linear.memory_bytes,
        lambda model: sum(tensor.nbytes for tensor in model.state_dict().values()),
    ):
        assert memory(plain) == memory(packed) > 0
