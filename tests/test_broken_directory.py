"""Hugging Face directories that are damaged, hostile or not understood: one error of ours each."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hf_directories import INDEX, change_tensors, edit, load_all

import realizar_torch as rt
from realizar_torch.checkpoint.safetensors_files import SafetensorsFiles

LONGROPE = {"rope_type": "longrope", "short_factor": ["x"], "long_factor": [1.0]}


def refused(directory: Path, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rt.load(directory)


# -- the tensors of the model ------------------------------------------------------------------------------


def test_every_missing_tensor_is_named(directory, sharded_llama):
    """Each kind of tensor once; none may be left to chance (field fault 42)."""
    names = [name for name in load_all(sharded_llama) if ".layers.0." in name or ".layers." not in name]
    assert len(names) == 12
    for name in names:
        shutil.rmtree(directory)
        shutil.copytree(sharded_llama, directory)
        change_tensors(directory, lambda tensors, name=name: tensors.pop(name))
        refused(directory, rt.MissingTensorsError, r"missing (blk\.0|token_embd|output)|no output head")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.1.self_attn.q_norm.weight", r"nobody would read 'model\.layers\.1\.self_attn\.q_norm"),
        ("model.layers.0.mlp.router.weight", r"unexpected blk\.0\.ffn_gate_inp\.weight"),
        ("visual.patch_embed.weight", "nobody would read 'visual"),
    ],
)
def test_a_tensor_nobody_reads_is_named(directory, name, words):
    change_tensors(directory, lambda t: t.update({name: torch.ones(24)}))
    refused(directory, rt.MissingTensorsError, words)


def test_buffers_of_older_checkpoints_are_passed_over(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(directory, lambda t: t.update({name: torch.ones(12)}))
    rt.load(directory)


@pytest.mark.parametrize("shape", [(288, 95), (287, 96), (96, 288), (288,), (288, 96, 1)])
def test_a_wrong_shape_is_named(directory, shape):
    name = "model.layers.0.self_attn.q_proj.weight"
    change_tensors(directory, lambda t: t.update({name: torch.randn(shape)}))
    refused(directory, rt.RealizarError, r"self_attn\.q_proj|blk\.0\.attn_q\.weight has shape")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_a_dtype_that_is_no_weight_is_named(directory, dtype):
    name = "model.layers.2.mlp.up_proj.weight"
    change_tensors(directory, lambda t: t.update({name: t[name].to(dtype)}))
    refused(directory, rt.CheckpointError, r"mlp\.up_proj\.weight.*dtype.*F32, F16, BF16")


def test_an_untied_model_without_head_is_refused(directory):
    """Field fault 32 d; a tied one shares the embedding."""
    change_tensors(directory, lambda t: t.pop("lm_head.weight"))
    refused(directory, rt.MissingTensorsError, "tie_word_embeddings is false")
    edit(directory / "config.json", tie_word_embeddings=True)
    model, _ = rt.load(directory)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_stored_head_counts_whatever_the_flag_says(directory):
    """Field fault 32 c, as in transformers; an equal one is shared."""
    edit(directory / "config.json", tie_word_embeddings=True)
    model, _ = rt.load(directory)
    assert torch.equal(model.lm_head.weight, load_all(directory)["lm_head.weight"])
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model, _ = rt.load(directory)
    assert model.lm_head.weight is model.embed_tokens.weight


# -- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "mamba"}, rt.UnsupportedArchitectureError, "'mamba' is not supported.*llama"),
        ({"model_type": ["llama"]}, rt.UnsupportedArchitectureError, "not supported"),
        (
            {"model_type": "falcon", "alibi": True, "parallel_attn": False},
            rt.UnsupportedArchitectureError,
            "parallel_attn = False, alibi = True is not supported, only parallel_attn = True, alibi = False",
        ),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            rt.UnsupportedArchitectureError,
            "inverse_layer_idx = True",
        ),
        ({"hidden_act": "relu"}, rt.UnsupportedArchitectureError, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, rt.UnsupportedArchitectureError, "'dynamic'"),
        ({"rope_parameters": {"mrope_section": [1]}}, rt.UnsupportedArchitectureError, "'mrope_section'"),
        ({"rope_parameters": "x"}, rt.CheckpointError, "'rope_parameters': found 'x', expected an object"),
        ({"rope_parameters": {"full_attention": [1]}}, rt.CheckpointError, "'full_attention': found"),
        ({"rope_parameters": None, "rope_scaling": 4}, rt.CheckpointError, "'rope_scaling': found 4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, rt.CheckpointError, "RoPE entries: found no 'factor'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, rt.CheckpointError, "RoPE entries"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, rt.CheckpointError, "'low_freq_factor'"),
        ({"rope_parameters": LONGROPE}, rt.CheckpointError, "RoPE entries: found could not convert.*'x'"),
        ({"quantization_config": {"quant_method": "gptq"}}, rt.UnsupportedArchitectureError, "'gptq'"),
        ({"quantization_config": 4}, rt.RealizarError, "quantized"),
        ({"num_hidden_layers": None}, rt.CheckpointError, "'num_hidden_layers'"),
        ({"num_hidden_layers": 2}, rt.MissingTensorsError, r"model\.layers\.2"),
        ({"num_hidden_layers": 4}, rt.MissingTensorsError, r"missing blk\.3"),
        ({"num_hidden_layers": 10**9}, rt.MissingTensorsError, "1000000000 layers"),
        ({"num_hidden_layers": "3"}, rt.RealizarError, "str|number"),
        ({"num_attention_heads": 0}, rt.RealizarError, "expected"),
        ({"num_attention_heads": 7}, rt.RealizarError, "heads|q_proj"),
        ({"hidden_size": 95}, rt.MissingTensorsError, "has shape"),
        ({"vocab_size": 274}, rt.MissingTensorsError, "token_embd.weight has shape"),
        ({"rms_norm_eps": "x"}, rt.CheckpointError, "layer_norm_rms_epsilon"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(directory, changes, error, words):
    edit(directory / "config.json", **changes)
    refused(directory, error, words)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x00", '{"model_type": "llama"}'])
def test_a_config_that_is_no_config_is_refused(directory, text):
    (directory / "config.json").write_text(text)
    refused(directory, rt.CheckpointError, "config.json")


def test_a_directory_without_tokenizer_needs_one(directory, sharded_llama):
    (directory / "tokenizer.json").unlink()
    refused(directory, rt.CheckpointError, "has no tokenizer.*tokenizer=")
    _, tokenizer = rt.load(directory, tokenizer=sharded_llama / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    (directory / "tokenizer.json").write_text('{"model": 1}')
    refused(directory, rt.CheckpointError, "tokenizer.json")


# -- the index ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x\0.safetensors", "", 3],
)
def test_an_index_leads_nowhere_else(directory, name):
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (directory / INDEX).write_text(json.dumps(index))
    refused(directory, rt.CheckpointError, r"model\.norm\.weight.*in this directory")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(directory, weight_map):
    edit(directory / INDEX, weight_map=weight_map)
    refused(directory, rt.CheckpointError, "weight_map")


def test_a_missing_shard_is_named(directory):
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    refused(directory, rt.IncompleteShardsError, f"{len(shards) - 1} of {len(shards)}.*{shards[1].name}")


def test_shards_without_their_index_are_told(directory):
    (directory / INDEX).unlink()
    refused(directory, rt.IncompleteShardsError, f"model-00001-of-.*but no {re.escape(INDEX)}")
    for path in directory.glob("*.safetensors"):
        path.unlink()
    refused(directory, rt.IncompleteShardsError, r"found none, expected model\.safetensors, or")


def test_safetensors_without_a_config_are_told(directory):
    (directory / "config.json").unlink()
    refused(directory, rt.CheckpointError, r"safetensors, but neither config\.json nor realizar\.json")


def test_index_and_files_must_agree(directory):
    index = json.loads((directory / INDEX).read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        name for name in names if name != index["weight_map"]["model.norm.weight"]
    )
    (directory / INDEX).write_text(json.dumps(index))
    refused(directory, rt.IncompleteShardsError, r"model\.norm\.weight")
    del index["weight_map"]["model.norm.weight"]
    (directory / INDEX).write_text(json.dumps(index))
    refused(directory, rt.IncompleteShardsError, r"model\.norm\.weight.*no entry")


# -- headers of safetensors files --------------------------------------------------------------------------


def header(entries: object, data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start=0, end=64, shape=(4, 4), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "four bytes": b"\x10\0\0\0",
    "length 0": struct.pack("<Q", 0) + bytes(64),
    "length 2^63": header({"a": entry()}, length=1 << 63),
    "length 2^64-1": header({"a": entry()}, length=(1 << 64) - 1),
    "length beyond the file": header({"a": entry()}, length=1000),
    "list": header([1, 2]),
    "no JSON": struct.pack("<Q", 3) + b"{{{",
    "not UTF-8": struct.pack("<Q", 4) + b'{"\xff"',
    "reversed": header({"a": entry(64, 0)}),
    "negative": header({"a": entry(-64, 0)}),
    "overlapping": header({"a": entry(0, 64), "b": entry(32, 96)}, bytes(96)),
    "hole": header({"a": entry(0, 64), "b": entry(128, 192)}, bytes(192)),
    "past the end": header({"a": entry(0, 128, (8, 4))}),
    "left over": header({"a": entry()}, bytes(65)),
    "shape against bytes": header({"a": entry(shape=(4, 5))}),
    "shape 2^32 squared": header({"a": entry(shape=(1 << 32, 1 << 32))}),
    "negative shape": header({"a": entry(shape=(-4, -4))}),
    "unknown dtype": header({"a": entry(dtype="F128")}),
    "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n",
    "HTML": b"<!DOCTYPE html><html></html>",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[name])
    with pytest.raises(rt.CheckpointError, match=r"model\.safetensors"):
        SafetensorsFiles(tmp_path)


def test_the_sound_neighbour_of_the_hostile_headers_is_read(tmp_path):
    values = torch.randn(4, 4)
    (tmp_path / "model.safetensors").write_bytes(header({"a": entry()}, values.numpy().tobytes()))
    assert torch.equal(SafetensorsFiles(tmp_path).read("a"), values)


def test_truncation_is_refused_at_every_length(directory):
    shard = sorted(directory.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    for size in (1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        refused(directory, rt.CheckpointError, shard.name)


def test_a_file_or_pipe_in_place_of_weights_is_refused(directory, tmp_path):
    import os

    refused(tmp_path / "no_such", rt.GGUFError, "no_such")
    refused(directory / INDEX, rt.CheckpointError, "give the directory")
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.unlink()
    os.mkfifo(shard)
    refused(directory, rt.IncompleteShardsError, shard.name)
