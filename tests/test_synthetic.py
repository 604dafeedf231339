"""The synthetic models of bench/: as many bytes as the real files, finite weights, norms that show."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from synthetic import SHAPES, Shape, SyntheticFile, load_synthetic, write


@pytest.mark.parametrize(("name", "expected"), [("1b", 799_592_448), ("8b", 4_616_331_264)])
def test_packed_bytes_of_a_step_are_those_of_the_real_files(name, expected):
    """All packed matrices but the table, of which a step reads a row."""
    tensors = SyntheticFile(SHAPES[name]).tensors
    packed = sum(info.nbytes for info in tensors.values() if info.fmt.packed)
    assert packed - tensors["token_embd.weight"].nbytes == expected


@pytest.mark.parametrize(("layers", "experts"), [(8, 0), (1, 4)])
def test_a_file_is_read_as_it_was_made(tmp_path, layers, experts):
    shape = Shape(layers, 256, 8, 2, 32, 256, 300, 512, experts, experts and 2)
    path = tmp_path / "m.gguf"
    write(path, shape)
    source, made = open_gguf(path), SyntheticFile(shape)
    assert list(source.tensors) == list(made.tensors)
    for name, info in source.tensors.items():
        found = source.read(name)
        assert torch.equal(found.flatten(), made.read(name).flatten())
        if info.fmt.packed:
            weights = rt.dequantize(found.flatten(0, -2), info.fmt.name, info.shape[-1])
            assert weights.isfinite().all()
            # products keep the size of what they are given
            assert 0.8 < float(weights.std()) * info.shape[-1] ** 0.5 < 1.2
            # 5 deviations; blocks of 32 and less are independent, and their means spread less than weights
            assert abs(float(weights.mean())) < 5 * float(weights.std()) * (32 / weights.numel()) ** 0.5
        elif "norm" in name:
            assert float(found.std()) > 0.2 and found.min() >= 0.3 and found.max() < 1.4
    assert {"Q4_K", "Q6_K", "F32"} == {info.fmt.name for info in source.tensors.values()}


def test_a_file_is_loaded_and_is_the_model_in_memory(tmp_path, monkeypatch):
    shape = Shape(2, 256, 4, 2, 64, 256, 300, 512)
    monkeypatch.setitem(SHAPES, "small", shape)
    write(tmp_path / "m.gguf", shape)
    tokenizer = SimpleNamespace(
        encode=None, decode=None, detokenizer=None, eos_token_ids=(), pad_token_id=None
    )
    ids = torch.randint(0, 300, (1, 9))
    options = {"dtype": torch.float32, "activations": "float"}
    model, _ = rt.load(tmp_path / "m.gguf", device="cpu", tokenizer=tokenizer, **options)
    same = load_synthetic("small", "cpu", max_seq_len=64, **options)
    with torch.inference_mode():
        logits = model(ids).logits
        assert torch.equal(logits, same(ids).logits)
    assert logits.isfinite().all() and 0.1 < float(logits.std()) < 10
