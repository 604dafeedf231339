"""Directories of rt.save that are damaged: one error of ours for each, before weight memory is allocated."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_directories import INDEX, edit
from random_models import write_random_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import TINY, write_tiny_llama

import realizar_torch as rt
from realizar_torch.models.saved_format import CONFIG_FILE, FORMATS_KEY


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Saved in several shards; nobody changes it."""
    folder = tmp_path_factory.mktemp("saved")
    rt.save(rt.load(write_tiny_llama(folder / "tiny.gguf"))[0], folder / "tiny", max_shard_size=300_000)
    return folder / "tiny"


@pytest.fixture
def saved(pristine, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def refused(directory: Path, error: type[Exception] | tuple[type[Exception], ...], words: str) -> None:
    with pytest.raises(error, match=words):
        rt.load(directory)


def rewrite(directory: Path, change, name: str | None = None) -> str:
    """``change`` edits tensors and formats of the shard with tensor ``name``; returns its file name."""
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    path = directory / weight_map[name or "norm.weight"]
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    with safe_open(path, "pt") as file:
        formats = json.loads(file.metadata()[FORMATS_KEY])
    change(tensors, formats)
    save_file(tensors, path, {FORMATS_KEY: json.dumps(formats)})
    return path.name


@pytest.mark.parametrize("version", [2, 0, "1", None, 1.5, [1]])
def test_unknown_versions_are_refused(saved, version):
    edit(saved / CONFIG_FILE, version=version)
    refused(saved, rt.CheckpointError, "version.*expected format 'realizar_torch' version 1.*update")


def test_every_missing_file_is_named(saved, pristine):
    for name in [path.name for path in pristine.iterdir()]:
        if name != CONFIG_FILE:
            (saved / name).unlink()
            words = r"model\.safetensors" if name == INDEX else name
            refused(saved, (rt.CheckpointError, rt.IncompleteShardsError), words)
            shutil.copy(pristine / name, saved / name)
    rt.load(saved)


def test_a_tensor_too_many_or_too_few_is_named(saved):
    def add(tensors, formats):
        tensors["layers.0.mlp.extra.weight"] = torch.ones(2, 2)

    rewrite(saved, add)
    refused(saved, rt.IncompleteShardsError, r"layers\.0\.mlp\.extra\.weight.*no entry")
    index = json.loads((saved / INDEX).read_text())
    index["weight_map"]["layers.0.mlp.extra.weight"] = index["weight_map"]["norm.weight"]
    (saved / INDEX).write_text(json.dumps(index))
    refused(saved, rt.MissingTensorsError, r"unexpected 'layers\.0\.mlp\.extra\.weight'")
    config = json.loads((saved / CONFIG_FILE).read_text())
    config["tensors"]["layers.0.mlp.extra.weight"] = {"fmt": "F32", "shape": [2, 2]}
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    refused(saved, rt.MissingTensorsError, r"unknown 'layers\.0\.mlp\.extra\.weight'")


def test_a_tensor_left_out_everywhere_is_named(saved):
    name = "layers.1.mlp.up_proj.weight"
    rewrite(saved, lambda tensors, formats: tensors.pop(name), name)
    index = json.loads((saved / INDEX).read_text())
    del index["weight_map"][name]
    (saved / INDEX).write_text(json.dumps(index))
    refused(saved, rt.MissingTensorsError, r"missing 'layers\.1\.mlp\.up_proj\.weight'")
    config = json.loads((saved / CONFIG_FILE).read_text())
    del config["tensors"][name]
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    refused(saved, rt.MissingTensorsError, r"missing blk\.1\.ffn_up\.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[:-1], r"U8 \[511, 144\].*expected U8 \[512, 144\]"),
        (lambda t: t[:, :-1], r"U8 \[512, 143\]"),
        (lambda t: t.view(512, 2, 72), r"U8 \[512, 2, 72\]"),
        (lambda t: t.view(torch.float16), r"F16 \[512, 72\]"),
        (lambda t: t.view(torch.int8), r"I8 \[512, 144\]"),
    ],
)
def test_a_weight_of_another_size_or_dtype_is_named(saved, change, words):
    name = "layers.0.mlp.gate_proj.weight"
    rewrite(saved, lambda t, formats: t.update({name: change(t[name]).contiguous()}), name)
    refused(saved, rt.CheckpointError, rf"layers\.0\.mlp\.gate_proj\.weight'.*{words}")


@pytest.mark.parametrize("fmt", ["Q4_0", "Q5_K", "Q4_X", "", None, 4])
def test_a_wrong_format_is_named(saved, fmt):
    """Q4_0 has as many bytes as Q4_K: only the second place where the format stands can tell."""
    name = "layers.0.mlp.gate_proj.weight"
    config = json.loads((saved / CONFIG_FILE).read_text())
    assert config["tensors"][name]["fmt"] == "Q4_K"
    config["tensors"][name]["fmt"] = fmt
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    refused(saved, rt.CheckpointError, r"layers\.0\.mlp\.gate_proj\.weight")


@pytest.mark.parametrize("formats", [{}, [], "Q4_K"])
def test_shards_without_formats_are_refused(saved, formats):
    def forget(tensors, told):
        pass

    name = rewrite(saved, forget)
    save_file(load_file(saved / name), saved / name, {FORMATS_KEY: json.dumps(formats)})
    refused(saved, rt.CheckpointError, f"{name}.*format None")


@pytest.mark.parametrize("shape", [[256], [256, 0], [256, -256], "x", None, [512, 255], [1 << 62, 1 << 62]])
def test_a_wrong_shape_is_named(saved, shape):
    name = "layers.0.mlp.gate_proj.weight"
    config = json.loads((saved / CONFIG_FILE).read_text())
    config["tensors"][name]["shape"] = shape
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    refused(saved, rt.RealizarError, r"gate_proj|ffn_gate")


def test_ties_must_be_told(saved, tmp_path):
    edit(saved / CONFIG_FILE, tied={"lm_head.weight": "embed_tokens.weight"})
    refused(saved, rt.CheckpointError, "'tied'.*a head of its own")
    edit(saved / CONFIG_FILE, tied={"norm.weight": "embed_tokens.weight"})
    refused(saved, rt.CheckpointError, "'tied'")
    rt.save(rt.load(write_random_model(tmp_path / "m.gguf", "llama"))[0], tmp_path / "tied")
    edit(tmp_path / "tied" / CONFIG_FILE, tied={})
    refused(tmp_path / "tied", rt.CheckpointError, "'tied'.*no output head")


@pytest.mark.parametrize("section", ["metadata", "tensors", "tied", "constants"])
@pytest.mark.parametrize("value", [None, [], 3])
def test_a_config_without_a_section_is_refused(saved, section, value):
    edit(saved / CONFIG_FILE, **{section: value})
    refused(saved, rt.CheckpointError, f"{CONFIG_FILE}.*'{section}'")


def test_truncated_and_foreign_files_are_refused(saved):
    for path in saved.iterdir():
        whole = path.read_bytes()
        for broken in (whole[:-1], whole[: len(whole) // 2], b"", b"[]", b"\xff\xfe" + whole):
            path.write_bytes(broken)
            refused(saved, rt.RealizarError, ".")
        path.write_bytes(whole)
    rt.load(saved)


_MEMORY = """
import json, resource, sys
import realizar_torch as rt
from realizar_torch.generation.causal_lm import load
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
try:
    load(sys.argv[1])
except rt.RealizarError as error:
    print(peak() - before)
"""


def test_damage_is_found_before_weight_memory_is_allocated(tmp_path):
    """A declared tensor of 64 MB whose shard is one byte short."""
    sizes = TINY._replace(inner=1 << 15)
    model, _ = rt.load(write_tiny_llama(tmp_path / "m.gguf", sizes=sizes))
    rt.save(model, tmp_path / "saved")
    shard = tmp_path / "saved" / "model.safetensors"
    assert shard.stat().st_size > 30e6
    os.truncate(shard, shard.stat().st_size - 1)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path / "saved")], capture_output=True, text=True, check=True
    )
    # what importing safetensors takes
    assert int(done.stdout) <= 16e6
