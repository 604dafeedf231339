"""torch's default dtype and device are the user's: kernels write through addresses and must not follow
them."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import random_blocks

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf

FMT, ROWS, COLUMNS = "Q4_K", 70, 512


@pytest.fixture(params=[torch.float64, torch.bfloat16, "meta"], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Call it to change what torch makes tensors of; half as many bytes as fp32, or none at all."""

    def change() -> None:
        if isinstance(request.param, str):
            torch.set_default_device(request.param)
        else:
            torch.set_default_dtype(request.param)

    yield change
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def products() -> dict[str, torch.Tensor]:
    """Every op on the CPU, in few rows and in many, both numerics."""
    weight, ids = random_blocks(FMT, ROWS, COLUMNS), torch.arange(9, device="cpu").view(3, 3)
    generator = torch.Generator().manual_seed(1)
    results = {}
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": generator}
    scale = torch.rand(COLUMNS, **options)
    experts = random_blocks(FMT, 4 * ROWS, COLUMNS).view(4, ROWS, -1)
    for count in (1, 3, 40):
        x = torch.randn(count, COLUMNS, **options)
        chosen = torch.arange(2 * count, device="cpu").view(count, 2) % 4
        q = rt.ops.quantize_activations(x, FMT)
        results |= {f"q {count}": q.q, f"scale {count}": q.scale, f"sums {count}": q.sums}
        for activations in ("float", "int8"):
            kind = f"{activations} {count}"
            numerics = {"activations": activations}
            results[f"linear {kind}"] = rt.ops.linear(x, weight, FMT, COLUMNS, **numerics)
            results[f"experts {kind}"] = rt.ops.expert_linear(
                x[:, None], chosen, experts, FMT, COLUMNS, **numerics
            )
            results[f"norm {kind}"] = rt.ops.norm_linear(
                x, scale, None, weight, FMT, COLUMNS, normalization="rmsnorm", eps=1e-5, **numerics
            )
    results["rows"] = rt.ops.embedding(ids, weight, FMT, COLUMNS)
    results["decoded"] = rt.ops.dequantize(weight, FMT, COLUMNS)
    results["blocks"] = rt.ops.quantize(torch.randn(5, COLUMNS, **options), FMT)
    return results


def test_ops_keep_their_bits(other_default: Callable[[], None]) -> None:
    expected = products()
    other_default()
    found = products()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize(("activations", "kv_dtype"), [("int8", None), ("float", None), ("int8", "int8")])
def test_generation_keeps_its_ids(
    activations: str, kv_dtype: str | None, tiny_path: Any, other_default: Callable[[], None]
) -> None:
    """A model that was loaded before and one that is loaded now; prompts longer than a step, and batches."""
    options: dict[str, Any] = {"device": "cpu", "activations": activations, "kv_dtype": kv_dtype}
    if kv_dtype is not None:
        warnings.filterwarnings("ignore", "decoding runs module by module")
    model, tokenizer = rt.load(tiny_path, **options)
    ids = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model.generate(ids, mask, max_new_tokens=12)
    text = rt.generate(model, tokenizer, "the cat", max_new_tokens=8)
    logits = model(ids, mask).logits
    other_default()
    assert torch.equal(model.generate(ids, mask, max_new_tokens=12), expected)
    later, tokenizer = rt.load(tiny_path, **options)
    assert torch.equal(later.generate(ids, mask, max_new_tokens=12), expected)
    assert torch.equal(later(ids, mask).logits, logits)
    assert rt.generate(later, tokenizer, "the cat", max_new_tokens=8) == text
    batch = rt.BatchedGenerator(later, max_batch=2)
    batch.add("the cat", tokenizer=tokenizer, max_new_tokens=8)
    assert [completion.text for completion in batch] == [text]
    assert open_gguf(tiny_path).read("output_norm.weight").dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_doctor_raises_no_false_alarm(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        assert rt.doctor().ok
    finally:
        torch.set_default_dtype(torch.float32)
