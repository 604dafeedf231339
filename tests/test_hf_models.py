"""rt.hf.from_gguf for every row of its table: logits of transformers itself, refusals instead of guesses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixture_models import WINDOW
from gguf_files import plain, write_gguf, write_split_gguf
from hf_reference import reference_model
from tiny_models import tiny_metadata, tiny_tensors, write_tiny_llama
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import TensorInfo, open_gguf
from realizar_torch.checkpoint.source import SourceView
from realizar_torch.errors import (
    GGUFError,
    IncompleteShardsError,
    MissingTensorsError,
    UnsupportedArchitectureError,
)
from realizar_torch.formats import get_format
from realizar_torch.hf.architectures import ARCHITECTURES
from realizar_torch.hf.config import llama3_divisors, read_config, stretched
from realizar_torch.hf.loading import load_model

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.gguf"))
ARCH_OF = {name: open_gguf(FIXTURES / f"{name}.gguf").arch for name in NAMES}
# of an architecture with a row, of files without experts
KNOWN = [name for name in NAMES if ARCH_OF[name] in ARCHITECTURES and name != "mixtral"]
# fp32 and the same operations on both sides: what is left is the order of sums of at most 100 terms
TOLERANCE = 1e-4
# what a file does not tell
OVERRIDES = {"mistral": {"sliding_window": WINDOW}}


def fixture_model(name: str, **options: Any) -> torch.nn.Module:
    file = open_gguf(FIXTURES / f"{name}.gguf")
    options = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "config": OVERRIDES.get(name),
    } | options
    return load_model(file, **options)


@pytest.mark.parametrize("name", KNOWN)
def test_logits_are_those_of_the_model_the_file_was_made_from(name: str) -> None:
    with np.load(FIXTURES / f"{name}.npz") as golden:
        ids, expected = torch.from_numpy(golden["ids"]), torch.from_numpy(golden["logits"])
    with torch.inference_mode():
        found = fixture_model(name)(ids).logits
    assert (found - expected).abs().max() <= TOLERANCE


def test_every_row_has_a_fixture() -> None:
    assert set(ARCH_OF.values()) >= ARCHITECTURES.keys()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KNOWN])
def test_what_has_no_row_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedArchitectureError):
        fixture_model(name)


class Requantized(SourceView):
    """A fixture whose matrices are Q8_0 blocks, or the values that these decode to."""

    def __init__(self, name: str, packed: bool) -> None:
        super().__init__(open_gguf(FIXTURES / f"{name}.gguf"))
        self._packed = packed

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        spec = get_format("Q8_0") if self._packed else get_format("F32")
        return {
            name: replace(info, fmt=spec) if self._is_matrix(name) else info
            for name, info in super().tensors.items()
        }

    def _is_matrix(self, name: str) -> bool:
        return len(super().tensors[name].shape) == 2 and not name.startswith(("position", "rope"))

    def read(self, name: str) -> torch.Tensor:
        values = super().read(name)
        if not self._is_matrix(name):
            return values
        blocks = rt.quantize(values.float(), "Q8_0")
        return blocks if self._packed else rt.dequantize(blocks, "Q8_0", values.shape[1])


@pytest.mark.parametrize(
    "name", ["llama", "llama-linear", "gemma3", "gpt2", "falcon-groups", "phi3", "command-r"]
)
def test_packed_weights_give_the_logits_of_their_decoded_values(name: str) -> None:
    """Rows are put in order, matrices turned and modules replaced alike for bytes and for floats."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    packed, decoded = (load_model(Requantized(name, kind), **options) for kind in (True, False))
    kinds = {type(module).__name__ for module in packed.modules()}
    assert "QuantizedLinear" in kinds and kinds & {"QuantizedEmbedding", "ScaledEmbedding"}
    assert not kinds & {"Linear", "Conv1D", "FalconLinear"}
    with np.load(FIXTURES / f"{name}.npz") as golden:
        ids = torch.from_numpy(golden["ids"])
    with torch.inference_mode():
        assert (packed(ids).logits - decoded(ids).logits).abs().max() <= TOLERANCE


def test_formats_of_every_kind_in_one_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    model, tokenizer = rt.hf.from_gguf(path, attn_implementation="eager")
    ids = torch.tensor([tokenizer("the cat and the other").input_ids])
    with torch.inference_mode():
        assert (model(ids).logits - reference_model(path)(ids).logits).abs().max() <= TOLERANCE
    assert model.model.layers[0].self_attn.q_proj.fmt == "Q4_0"
    assert type(model.model.layers[1].self_attn.v_proj) is torch.nn.Linear


def broken(tmp_path: Path, *, tensors: Any = None, metadata: Any = None) -> Path:
    changed = tiny_tensors() if tensors is None else tensors
    return write_gguf(tmp_path / "broken.gguf", tiny_metadata() | (metadata or {}), changed)


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_down.weight", "blk.0.attn_norm.weight", "output_norm.weight", "token_embd.weight"]
)
def test_a_deleted_tensor_is_named(name: str, tmp_path: Path) -> None:
    """F-42: transformers would start it at random, with a warning."""
    tensors = {key: value for key, value in tiny_tensors().items() if key != name}
    with pytest.raises(MissingTensorsError, match=f"missing {name}"):
        rt.hf.from_gguf(broken(tmp_path, tensors=tensors))


def test_a_tensor_that_nobody_reads_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {
        "blk.0.attn_q.bias": plain(torch.ones(256)),
        "blk.0.extra": plain(torch.ones(1)),
    }
    with pytest.raises(MissingTensorsError, match=r"missing blk\.0\.attn_k\.bias.*unexpected blk\.0\.extra"):
        rt.hf.from_gguf(broken(tmp_path, tensors=tensors))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_norm.weight": plain(torch.ones(255))}
    with pytest.raises(
        MissingTensorsError, match=r"blk\.0\.attn_norm\.weight has shape \[255\], expected \[256\]"
    ):
        rt.hf.from_gguf(broken(tmp_path, tensors=tensors))


def test_a_packed_norm_is_refused(tmp_path: Path) -> None:
    blocks = rt.quantize(torch.rand(1, 256), "Q8_0").numpy().tobytes()
    tensors = tiny_tensors() | {"blk.0.attn_norm.weight": ("Q8_0", (256,), blocks)}
    with pytest.raises(UnsupportedArchitectureError, match=r"attn_norm\.weight is Q8_0.*plain floats"):
        rt.hf.from_gguf(broken(tmp_path, tensors=tensors))


def test_a_missing_shard_is_an_error_and_any_shard_opens_the_model(tmp_path: Path) -> None:
    shards = write_split_gguf(
        tmp_path, "tiny", tiny_metadata(), tiny_tensors(), [9, 0, len(tiny_tensors()) - 9]
    )
    model, _ = rt.hf.from_gguf(shards[2])
    whole, _ = rt.hf.from_gguf(write_tiny_llama(tmp_path / "whole.gguf"))
    ids = torch.arange(5)[None]
    assert torch.equal(model(ids).logits, whole(ids).logits)
    shards[1].unlink()
    with pytest.raises(IncompleteShardsError, match="00002-of-00003"):
        rt.hf.from_gguf(shards[0])


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("general.architecture", "rwkv7", UnsupportedArchitectureError),
        ("llama.expert_count", 8, UnsupportedArchitectureError),
        ("llama.attention.value_length", 16, UnsupportedArchitectureError),
        ("llama.logit_scale", 0.5, UnsupportedArchitectureError),
        ("llama.rope.scaling.type", "dynamic", UnsupportedArchitectureError),
        ("llama.attention.causal", False, UnsupportedArchitectureError),
        ("llama.block_count", 0, GGUFError),
        ("llama.block_count", 3, MissingTensorsError),
        ("tokenizer.ggml.model", "t5", UnsupportedArchitectureError),
        ("tokenizer.ggml.pre", "no-such-rule", UnsupportedArchitectureError),
    ],
)
def test_metadata_that_mean_another_model_are_refused(
    key: str, value: Any, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        rt.hf.from_gguf(broken(tmp_path, metadata={key: value}))


# F-38: the divisors in the files of Llama 3.2 1B and 3.1 8B, to four decimals
PUBLISHED = {
    (32.0, 64): [1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14,
    (8.0, 128): [1.0] * 29 + [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573] + [8.0] * 29,
}


@pytest.mark.parametrize(("factor", "rotated"), PUBLISHED)
def test_rotary_divisors_of_llama_3_are_named_by_its_scheme(factor: float, rotated: int) -> None:
    divisors = llama3_divisors(factor, 500_000.0, rotated)
    assert divisors == pytest.approx(PUBLISHED[factor, rotated], abs=5e-5)
    rope = {"rope_theta": 500_000.0} | stretched(divisors, 500_000.0, rotated, 131_072)
    assert (rope["rope_type"], rope["factor"]) == ("llama3", factor)
    config = LlamaConfig(head_dim=rotated, max_position_embeddings=131_072, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain_frequencies = 500_000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    assert (plain_frequencies / frequencies).tolist() == pytest.approx(divisors, rel=1e-5)


def test_divisors_of_no_scheme_are_applied(tmp_path: Path) -> None:
    divisors = torch.rand(16) * 7 + 0.5
    path = broken(tmp_path, tensors=tiny_tensors() | {"rope_freqs.weight": plain(divisors)})
    ids = torch.arange(100)[None]
    model, _ = rt.hf.from_gguf(path, attn_implementation="eager")
    with torch.inference_mode():
        assert (model(ids).logits - reference_model(path)(ids).logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("told", "expected"), [(0.0, None), (7.0, 7.0), (None, 30.0)])
def test_a_soft_cap_of_zero_is_none(told: float | None, expected: float | None) -> None:
    """F-39"""
    file = SourceView(open_gguf(FIXTURES / "gemma2.gguf"))
    metadata = dict(file.metadata)
    del metadata["gemma2.final_logit_softcapping"]
    if told is not None:
        metadata["gemma2.final_logit_softcapping"] = told
    row = ARCHITECTURES["gemma2"]
    source = SimpleNamespace(path=file.path, tensors=file.tensors, read=file.read, metadata=metadata)
    assert read_config(source, row, {}, {}).final_logit_softcapping == expected


def test_a_file_that_names_no_special_ids_gets_none_of_another_model() -> None:
    model = fixture_model("llama")
    assert model.config.eos_token_id is model.generation_config.eos_token_id is None
