"""project: linears that share an input quantize it once, and each gives what it gives alone."""

import pytest
import torch
from cases import random_activations, random_blocks

import realizar_torch as rt
from realizar_torch.nn.projection import project


def int8_linear(fmt: str = "Q4_K") -> rt.QuantizedLinear:
    bias = torch.randn(33)
    return rt.QuantizedLinear.from_blocks(random_blocks(fmt, 33, 300), 300, fmt, bias, activations="int8")


@torch.no_grad()
def test_activations_are_quantized_once_for_formats_of_one_width() -> None:
    """Each result is the module's own; 300 columns are padded to 512 for K-quants and to 320 for Q8_0."""
    linears = [int8_linear(fmt) for fmt in ("Q4_K", "Q8_0", "Q6_K")]
    x = random_activations(2, 3, 300)
    with rt.record_dispatch() as metrics:
        outputs = project(x, linears)
    assert metrics.summary("quantize_activations").count == 2
    assert all(torch.equal(y, linear(x)) for y, linear in zip(outputs, linears, strict=True))


@torch.no_grad()
def test_hooks_of_linears_that_share_an_input_see_the_input() -> None:
    linears, seen = [int8_linear() for _ in "qk"], []
    linears[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = random_activations(2, 3, 300)
    project(x, linears)
    assert len(seen) == 1 and seen[0] is x


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 5, 9, 65])
@torch.no_grad()
def test_each_result_on_a_gpu_is_the_modules_own_for_any_number_of_rows(rows: int) -> None:
    linears = [int8_linear(fmt).cuda() for fmt in ("Q4_K", "Q8_0", "Q6_K")]
    x = random_activations(rows, 300).cuda()
    assert all(torch.equal(y, linear(x)) for y, linear in zip(project(x, linears), linears, strict=True))
