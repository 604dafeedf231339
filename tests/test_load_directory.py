"""rt.load of Hugging Face directories: logits of transformers, encoded weights, and every damage refused."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf_files import plain, write_gguf
from hf_directories import KINDS, VOCAB, WINDOW, change_tensors, edit, write_hf_directory
from safetensors.torch import save_file

import realizar_torch as rt
from realizar_torch.formats import Q4_0
from realizar_torch.models.encoding import EncodedSource
from realizar_torch.models.sources import open_source

# fp32 on both sides; logits of size 10, sums of up to 160 terms in other orders
TOLERANCE = 2e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
VARIANTS = {
    **{kind: (kind, {}) for kind in KINDS},
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, sharded": ("llama", {"shard": "100KB"}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, bf16": ("llama", {"dtype": torch.bfloat16}),
    "gemma3_text, bf16": ("gemma3_text", {"dtype": torch.bfloat16}),
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 60), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_beyond_the_window(name, tmp_path, ids):
    kind, changes = VARIANTS[name]
    expected = write_hf_directory(tmp_path, kind, **changes)
    model, _ = rt.load(tmp_path, activations="float", dtype="float32")
    with torch.inference_mode():
        ours, reference = model(ids).logits, expected(ids).logits
    assert ids.shape[1] > 2 * WINDOW and reference.std() > 1
    assert (ours - reference).abs().max() <= TOLERANCE


def test_old_spellings_of_config_mean_the_same(tmp_path, ids):
    """As transformers wrote it before version 5."""
    expected = write_hf_directory(tmp_path, rope_parameters=LLAMA3)
    old = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit(tmp_path / "config.json", rope_parameters=None, rope_theta=5000.0, rope_scaling=old, head_dim=24)
    with torch.inference_mode():
        ours = rt.load(tmp_path, activations="float")[0](ids).logits
        assert (ours - expected(ids).logits).abs().max() <= TOLERANCE


def test_greedy_ids_equal_transformers(tmp_path):
    expected = write_hf_directory(tmp_path, "gemma3_text")
    model, tokenizer = rt.load(tmp_path, activations="float")
    prompt = torch.tensor([tokenizer.encode("the cat in the hat and the")])
    ours = model.generate(prompt, max_new_tokens=np.int64(24), eos_token_id=[])
    theirs = expected.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_part_of_a_model_that_also_sees(tmp_path, ids, prefix):
    """As google/gemma-3-4b-it is stored, old and new: config entries at their default are left out there."""
    expected = write_hf_directory(
        tmp_path, "gemma3_text", num_attention_heads=8, head_dim=256, query_pre_attn_scalar=256
    )
    path = tmp_path / "config.json"
    text = {key: value for key, value in json.loads(path.read_text()).items() if value is not None}
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "query_pre_attn_scalar",
        "rms_norm_eps",
    ):
        del text[key]
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))

    def add_eyes(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)
        tensors["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(3, 3)

    change_tensors(tmp_path, add_eyes)
    model, _ = rt.load(tmp_path, activations="float")
    with torch.inference_mode():
        assert (model(ids).logits - expected(ids).logits).abs().max() <= TOLERANCE


# -- encoded while loading ---------------------------------------------------------------------------------


def test_encoded_weights_are_those_of_quantize(directory):
    """Rows of 96 are no whole blocks of 256: they take blocks of 32, as in llama.cpp."""
    dense, _ = rt.load(directory, activations="float")
    model, _ = rt.load(directory, quantize="Q4_K")
    for name, linear in dense.named_modules():
        if isinstance(linear, torch.nn.Linear | torch.nn.Embedding):
            packed = model.get_submodule(name)
            assert packed.fmt == ("Q8_0" if name == "lm_head" else "Q5_0"), name
            assert torch.equal(packed.weight, rt.quantize(linear.weight, packed.fmt)), name
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(norms(model), norms(dense), strict=True))


def test_routers_and_positions_stay_dense(tmp_path):
    """They are small, and routers decide where a token goes; all other matrices are encoded."""
    kept = {"position_embd", "blk.0.ffn_gate_inp", "blk.0.ffn_gate_inp_shexp", "blk.0.attn_norm"}
    encoded = {"token_embd", "blk.0.attn_q", "blk.0.ffn_gate_exps"}
    shapes = {"blk.0.attn_norm": (64,), "blk.0.ffn_gate_exps": (2, 3, 64)}
    tensors = {f"{n}.weight": plain(torch.randn(shapes.get(n, (3, 64)))) for n in sorted(kept | encoded)}
    path = write_gguf(tmp_path / "any.gguf", {"general.architecture": "qwen2moe"}, tensors)
    source = EncodedSource(open_source(path), "Q4_0")
    packed = {name.removesuffix(".weight") for name, info in source.tensors.items() if info.fmt.packed}
    assert packed == encoded
    assert source.read("blk.0.ffn_gate_inp.weight").dtype == torch.float32
    assert source.read("blk.0.ffn_gate_exps.weight").shape == (2, 3, Q4_0.row_bytes(64))


def norms(model):
    return [module for name, module in model.named_modules() if name.endswith("norm")]


def test_whole_blocks_take_the_format_asked_for(tmp_path, ids):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 36}
    write_hf_directory(tmp_path, hidden_size=256, intermediate_size=512, tie_word_embeddings=True, **heads)
    model, _ = rt.load(tmp_path, quantize="Q4_K", activations="float")
    dense, _ = rt.load(tmp_path, activations="float")
    formats = {name: module.fmt for name, module in model.named_modules() if hasattr(module, "fmt")}
    # o_proj has 288 columns; the embedding is the head
    assert formats.pop("embed_tokens") == "Q6_K" and formats.pop("lm_head") == "Q6_K"
    assert model.lm_head.weight is model.embed_tokens.weight
    assert {fmt for name, fmt in formats.items() if "o_proj" in name} == {"Q5_0"}
    assert {fmt for name, fmt in formats.items() if "o_proj" not in name} == {"Q4_K"}
    with torch.no_grad():
        for name, module in dense.named_modules():
            if hasattr(module, "weight") and name in formats | {"embed_tokens": ""}:
                module.weight.copy_(model.get_submodule(name).dequantize())
        assert (model(ids).logits - dense(ids).logits).abs().max() <= TOLERANCE


def test_a_plan_names_tensors_by_pattern(directory):
    plan = {"blk.1.attn_*.weight": "Q8_0", "blk.*.ffn_down.weight": "Q4_0", "blk.*.attn_q.weight": "Q5_1"}
    model, _ = rt.load(directory, quantize=plan)
    formats = {name: m.fmt for name, m in model.named_modules() if isinstance(m, rt.QuantizedLinear)}
    layer = {f"layers.{n}.mlp.down_proj": "Q4_0" for n in range(3)}
    layer |= {f"layers.{n}.self_attn.q_proj": "Q5_1" for n in (0, 2)}
    assert formats == layer | {f"layers.1.self_attn.{name}_proj": "Q8_0" for name in "qkvo"}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blk.*.attn_query.weight": "Q8_0"}, r"attn_query\.weight' matches nothing.*token_embd\.weight"),
        ({"blk.*norm.weight": "Q8_0"}, "matches nothing"),
        ("Q4_K_M", "unknown format 'Q4_K_M'"),
        ("F16", "plain float"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(directory, plan, words):
    with pytest.raises(rt.FormatError, match=words):
        rt.load(directory, quantize=plan)


def test_encoding_needs_something_dense(tmp_path):
    from tiny_models import write_tiny_llama

    path = write_tiny_llama(tmp_path / "tiny.gguf")
    model, _ = rt.load(path, quantize={"blk.1.attn_v.weight": "Q8_0"})
    assert model.layers[1].self_attn.v_proj.fmt == "Q8_0" and model.layers[0].self_attn.v_proj.fmt == "Q6_K"
    rt.load(path, quantize="Q8_0")[0].layers[1].mlp.down_proj.fmt = "Q8_0"
    with pytest.raises(rt.FormatError, match="matches nothing"):
        rt.load(path, quantize={"blk.0.attn_v.weight": "Q8_0"})


def test_matrices_that_stay_dense_are_told(tmp_path):
    write_hf_directory(tmp_path, intermediate_size=100)
    with pytest.warns(UserWarning, match=r"3 of the 23 matrices.*blk\.0\.ffn_down\.weight \(rows of 100\)"):
        model, _ = rt.load(tmp_path, quantize="Q4_K")
    assert isinstance(model.layers[0].mlp.down_proj, torch.nn.Linear)
    with pytest.raises(rt.FormatError, match=r"3 of the 3 matrices.*nothing would be encoded"):
        rt.load(tmp_path, quantize={"blk.*.ffn_down.weight": "Q8_0"})


# -- memory ------------------------------------------------------------------------------------------------


def test_the_files_are_not_changed_and_give_memory_back(directory):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    for path in directory.iterdir():
        path.chmod(0o444)
    model, _ = rt.load(directory)
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    source = open_source(directory)
    first = source.read("blk.0.ffn_up.weight").clone()
    source.release("blk.0.ffn_up.weight")
    assert torch.equal(source.read("blk.0.ffn_up.weight"), first)


_MEMORY = """
import re, sys
from pathlib import Path
import torch, gguf, safetensors.torch, tokenizers
import realizar_torch as rt
def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
rt.load(sys.argv[1], quantize="Q8_0")
# the high-water mark starts anew
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model, _ = rt.load(sys.argv[2], quantize="Q8_0")
print(status("VmHWM") - before - sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_encoding_needs_memory_for_one_tensor_beside_the_result(sharded_llama, tmp_path):
    """290 MB of fp32, 34 MB the largest tensor; that the file's pages stay is what must not happen."""
    config = json.loads((sharded_llama / "config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2}
    shutil.copytree(sharded_llama, tmp_path / "large", ignore=shutil.ignore_patterns("*safetensors*"))
    (tmp_path / "large" / "config.json").write_text(json.dumps(config | sizes))
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, 2048), "model.norm.weight": torch.ones(2048)}
    tensors["lm_head.weight"] = torch.zeros(VOCAB, 2048)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            *(("self_attn.q_proj", 2048, 2048), ("self_attn.k_proj", 512, 2048)),
            *(("self_attn.v_proj", 512, 2048), ("self_attn.o_proj", 2048, 2048)),
            *(("mlp.gate_proj", 4096, 2048), ("mlp.up_proj", 4096, 2048), ("mlp.down_proj", 2048, 4096)),
        ):
            tensors[f"{prefix}{name}.weight"] = torch.randn(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(2048)
    save_file(tensors, tmp_path / "large" / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(sharded_llama), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=True,
    )
    # measured: 41 MB, and 252 MB where nothing is given back
    assert int(done.stdout) <= total / 2
