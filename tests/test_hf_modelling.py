"""Modelling files of transformers, read for what they do to weights that are bytes now."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import realizar_torch as rt
from realizar_torch.hf.architectures import ARCHITECTURES
from realizar_torch.hf.modules import ScaledEmbedding, pack_modules, weight_shape

MODEL_TYPES = sorted(
    {row.model_type for row in ARCHITECTURES.values()}
    | {row.windowed_type for row in ARCHITECTURES.values() if row.windowed_type}
)
# What these files do with the weight of a linear layer or an embedding, and why it is right for packed ones.
KNOWN = {
    # our ScaledEmbedding stands in for it: √640 cast to the dtype of bytes would be 25
    "TextScaledWordEmbedding: self.weight",
    # our QuantizedLinear stands in for it
    "FalconLinear: self.weight",
    # with FlashAttention 2 on float32; a quantized model takes config.dtype before it gets there
    "FalconFlashAttention2: self.query_key_value.weight",
}


def modelling_file(model_type: str) -> Path:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return Path(inspect.getfile(model_class))


def uses_of_weights(source: str) -> set[str]:
    """'Class: expression' for every `.weight` but a norm's own and what `_init_weights` starts."""
    found = set()
    for owner in ast.parse(source).body:
        if not isinstance(owner, ast.ClassDef):
            continue
        holds_matrix = any(
            ast.unparse(base).endswith(("Linear", "Embedding", "Conv1D")) for base in owner.bases
        )
        for function in owner.body:
            if isinstance(function, ast.FunctionDef) and function.name != "_init_weights":
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and node.attr == "weight":
                        text = ast.unparse(node)
                        if holds_matrix or text != "self.weight":
                            found.add(f"{owner.name}: {text}")
    return found


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_no_modelling_file_does_anything_else_with_a_weight(model_type: str) -> None:
    found = uses_of_weights(modelling_file(model_type).read_text(encoding="utf-8"))
    unknown = {use for use in found if not any(use.endswith(known) for known in KNOWN)}
    assert unknown == set()


def test_the_search_finds_what_it_is_for() -> None:
    source = """
class Norm(nn.Module):
    def forward(self, x):
        return self.weight * x
class Scaled(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * self.scale.to(self.weight.dtype)
class Wo(nn.Module):
    def forward(self, x):
        return self.wo(x.to(self.wo.weight.dtype))
"""
    assert uses_of_weights(source) == {"Scaled: self.weight", "Wo: self.wo.weight"}
    t5 = Path(inspect.getfile(CONFIG_MAPPING["t5"])).with_name("modeling_t5.py")
    assert any(use.endswith("self.wo.weight") for use in uses_of_weights(t5.read_text(encoding="utf-8")))
    everything = set().union(*(uses_of_weights(modelling_file(t).read_text("utf-8")) for t in MODEL_TYPES))
    assert all(any(use.endswith(known) for use in everything) for known in KNOWN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_embedding_rounds_its_scale_as_transformers_does(dtype: torch.dtype) -> None:
    """F-40: √640 is 25.298, and 25.25 in bfloat16."""
    rows, columns = 7, 64
    blocks = rt.quantize(torch.randn(rows, columns), "Q8_0")
    dense = Gemma3TextScaledWordEmbedding(rows, columns, 0, embed_scale=640**0.5)
    dense.weight.data = rt.dequantize(blocks, "Q8_0", columns)
    holder = torch.nn.Module()
    holder.embed = dense
    pack_modules(holder, {"embed": "Q8_0"}, dtype=dtype, activations="float")
    packed = holder.embed
    assert isinstance(packed, ScaledEmbedding) and packed.weight.is_meta
    packed.weight = torch.nn.Parameter(blocks, requires_grad=False)
    ids = torch.arange(rows).flip(0)[None]
    assert torch.equal(packed(ids), dense.to(dtype)(ids))
    assert "scale=25.29" in repr(packed)


def test_other_subclasses_are_not_taken_for_what_they_extend() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Shifted(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + 1

    assert weight_shape(Doubled(4, 3)) is None and weight_shape(Shifted(4, 3)) is None
    assert weight_shape(FalconLinear(4, 3)) == (3, 4)
    holder = torch.nn.Module()
    holder.inner = Doubled(32, 3)
    with pytest.raises(rt.UnsupportedArchitectureError, match="inner is a Doubled, which cannot hold Q8_0"):
        pack_modules(holder, {"inner": "Q8_0"}, dtype=torch.float32, activations="float")
