"""GGUF files that are not models: each is told by what it is."""

import pytest
import torch
from command_line import call
from gguf_files import plain, write_gguf
from tiny_models import tiny_metadata, tokenizer_metadata, write_tiny_llama

import realizar_torch as rt

ONE_TENSOR = {"a": plain(torch.randn(4, 32))}


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"general.architecture": "llama", "general.type": "adapter"}, ONE_TENSOR, "is a LoRA adapter"),
        ({"general.type": "imatrix"}, ONE_TENSOR, "is an importance matrix"),
        ({"general.architecture": "clip", "general.type": "mmproj"}, ONE_TENSOR, "is the projector"),
        ({"general.architecture": "clip"}, ONE_TENSOR, "is the projector"),
        (tiny_metadata(), {}, "is a vocabulary without weights"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, capsys, metadata, tensors, words):
    path = write_gguf(tmp_path / "other.gguf", metadata, tensors)
    with pytest.raises(rt.UnsupportedArchitectureError, match=f"^{path} {words}"):
        rt.load(path)
    assert words in call(capsys, "check", path)[1]
    assert words in call(capsys, "quantize", path, tmp_path / "out", "--format", "Q8_0")[2]


def test_a_vocabulary_serves_as_tokenizer(tmp_path):
    model = write_tiny_llama(tmp_path / "model.gguf")
    words = write_gguf(tmp_path / "vocabulary.gguf", tokenizer_metadata(), {})
    assert rt.load(model, tokenizer=words)[1].encode("the cat") == rt.load(model)[1].encode("the cat")
