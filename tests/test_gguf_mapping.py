"""The mapping of a GGUF file: private, writable, gone with its last user."""

import gc
import hashlib
import mmap
import warnings
from pathlib import Path

import pytest
import torch
from gguf_files import packed, plain, write_gguf, write_split_gguf

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import GGUFError


def mapped(path: Path) -> bool:
    """Whether this process maps the file or holds a descriptor of it."""
    gc.collect()
    links = (entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return str(path) in Path("/proc/self/maps").read_text() or path in links


def test_mapping_is_private_and_goes_away(tmp_path: Path) -> None:
    tensors = {"w": plain(torch.randn(4, 8)), "q": packed("Q8_0", 4, 32)}
    path = tmp_path / "read-only" / "m.gguf"
    path.parent.mkdir()
    write_gguf(path, {}, tensors)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = open_gguf(path)
        weight, blocks = file.read("w"), file.read("q")
        weight.add_(1)
        blocks.fill_(7)
        torch.nn.Parameter(blocks, requires_grad=False).share_memory_()
        weight.half().numpy()[0] = 0
    expected = torch.frombuffer(bytearray(tensors["w"][2]), dtype=torch.float32).view(4, 8) + 1
    assert torch.equal(file.read("w"), expected)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert mapped(path)
    del file, blocks
    assert mapped(path) and torch.equal(weight, expected)
    del weight
    assert not mapped(path)
    path.parent.chmod(0o755)
    path.unlink()


def test_arrays_keep_the_mapping_and_numpy_copies_do_not(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"scores": [0.5, 1.5], "tokens": ["a", "b"]}, {})
    file = open_gguf(path)
    tokens, scores = file.metadata["tokens"], file.metadata["scores"].numpy()
    del file
    assert mapped(path) and list(tokens) == ["a", "b"]
    del tokens
    assert not mapped(path)
    scores[0] = 9
    assert scores.tolist() == [9, 1.5]


def test_released_memory_ends_at_whole_pages(tmp_path: Path) -> None:
    """What is given back is read from the file again; a neighbour on the same page keeps its changes."""
    tensors = {name: plain(torch.randn(3, mmap.PAGESIZE // 4 + 8)) for name in "abc"}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", {}, tensors))
    stored = {name: file.read(name).clone() for name in "abc"}
    for name in "abc":
        file.read(name).neg_()
    file.release("b")
    assert torch.equal(file.read("a"), -stored["a"]) and torch.equal(file.read("c"), -stored["c"])
    # its whole pages are the file's again
    assert (file.read("b") == stored["b"]).sum() >= mmap.PAGESIZE // 4
    assert torch.equal(file.read("b").abs(), stored["b"].abs())


def test_failure_leaves_no_mapping_even_while_the_error_lives(tmp_path: Path) -> None:
    tensors = {name: packed("Q8_0", 4, 32) for name in "abc"}
    shards = write_split_gguf(tmp_path, "m", {}, tensors, [1, 1, 1])
    shards[2].write_bytes(shards[2].read_bytes()[:-40])
    with pytest.raises(GGUFError, match=r"m-00003-of-00003\.gguf: tensor 'c'") as caught:
        open_gguf(shards[0])
    assert caught.value.__traceback__ is not None
    assert not any(mapped(shard) for shard in shards)
