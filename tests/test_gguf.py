"""Sound GGUF files: exact bytes and values, lazy metadata, split models, a private mapping that goes away."""

import gc
import hashlib
import os
import sys
import time
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Typed, gguf_bytes, plain, write_gguf, write_split_gguf

from realizar_torch.checkpoint.gguf import GGUFFile, open_gguf
from realizar_torch.errors import GGUFError, IncompleteShardsError
from realizar_torch.formats import FORMATS, PACKED_FORMATS

METADATA = {
    "general.architecture": "llama",
    "a.u8": Typed("u8", 255),
    "a.i8": Typed("i8", -128),
    "a.u16": Typed("u16", 65535),
    "a.i16": Typed("i16", -32768),
    "a.u32": Typed("u32", 2**32 - 1),
    "a.i32": Typed("i32", -(2**31)),
    "a.u64": Typed("u64", 2**64 - 1),
    "a.i64": Typed("i64", -(2**63)),
    "a.f32": Typed("f32", 0.1),
    "a.f64": Typed("f64", 0.1),
    "a.true": True,
    "a.false": False,
    "a.text": "naïve ▁token 漢字 🙂\n",
    "a.empty": "",
}
ARRAYS = {
    "tokenizer.ggml.tokens": ["<s>", "▁the", "", "🙂", "a\tb"],
    "tokenizer.ggml.scores": [0.5, -1.25, 3.0],
    "tokenizer.ggml.token_type": [1, -2, 2**31 - 1],
    "a.flags": [True, False, True],
    "a.bytes": Typed("u8", [0, 7, 255]),
    "a.wide": Typed("u64", [2**64 - 1, 0]),
    "a.doubles": Typed("f64", [0.1, -0.2]),
    "a.no_strings": Typed("string", []),
    "a.no_numbers": Typed("i32", []),
}


def packed(name: str, *shape: int, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of random bytes in a packed format."""
    fmt = FORMATS[name]
    count = int(np.prod(shape[:-1], dtype=int)) * fmt.row_bytes(shape[-1])
    return name, shape, np.random.default_rng(seed).bytes(count)


def all_formats() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """One or two tensors of each format, of one to three dimensions, sizes that need padding between them."""
    tensors = {f"{fmt.name}.weight": packed(fmt.name, 3, 2 * fmt.block_size) for fmt in PACKED_FORMATS}
    tensors["row.weight"] = packed("Q5_0", 96)
    tensors["experts.weight"] = packed("Q4_K", 2, 3, 256)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors[f"{dtype}.weight"] = plain(torch.randn(5, 7).to(dtype))
        tensors[f"{dtype}.bias"] = plain(torch.randn(3).to(dtype))
    return tensors


def same_bytes(file: GGUFFile, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    assert list(file.tensors) == list(tensors)
    for name, (fmt, shape, data) in tensors.items():
        info, tensor = file.tensors[name], file.read(name)
        assert (info.name, info.fmt.name, info.shape, info.nbytes) == (name, fmt, shape, len(data))
        last = info.fmt.row_bytes(shape[-1]) if info.fmt.packed else shape[-1]
        assert tuple(tensor.shape) == (*shape[:-1], last)
        assert tensor.view(torch.uint8).numpy().tobytes() == data
        start = file.shards[info.shard].read_bytes()[info.offset : info.offset + info.nbytes]
        assert start == data


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_every_format_version_and_alignment(tmp_path: Path, version: int, alignment: int) -> None:
    tensors = all_formats()
    path = write_gguf(tmp_path / "m.gguf", METADATA, tensors, version=version, alignment=alignment)
    file = open_gguf(path)
    same_bytes(file, tensors)
    assert file.arch == "llama" and file.path == path and file.shards == (path,)


def test_plain_values_are_exact(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.5, 3.140625], [1e-38, -0.0, 65280.0]])
    tensors = {
        str(dtype): plain(values.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    file = open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = file.read(str(dtype))
        assert tensor.dtype == dtype
        assert torch.equal(tensor, values.to(dtype)) and torch.signbit(tensor[1, 1])


def test_scalar_metadata(tmp_path: Path) -> None:
    metadata = open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, {})).metadata
    expected = {key: entry.value if isinstance(entry, Typed) else entry for key, entry in METADATA.items()}
    expected["a.f32"] = float(np.float32(0.1))
    assert dict(metadata) == expected
    assert {key: type(entry) for key, entry in metadata.items()} == {k: type(v) for k, v in expected.items()}


def test_array_metadata(tmp_path: Path) -> None:
    # an odd key length puts the numbers at odd positions of the file
    path = write_gguf(tmp_path / "m.gguf", {"odd": "x", **ARRAYS}, {})
    metadata = open_gguf(path).metadata
    for key, entry in ARRAYS.items():
        expected = entry.value if isinstance(entry, Typed) else entry
        lazy = metadata[key]
        assert list(lazy) == expected and len(lazy) == len(expected)
        assert [lazy[i] for i in range(-len(lazy), len(lazy))] == expected * 2
        assert lazy[1:] == expected[1:] and lazy[::-1] == expected[::-1]
        assert [type(item) for item in lazy] == [type(item) for item in expected]
        for outside in (len(lazy), -len(lazy) - 1):
            with pytest.raises(IndexError):
                lazy[outside]
    scores, wide = metadata["tokenizer.ggml.scores"].numpy(), metadata["a.wide"].numpy()
    assert scores.dtype == np.float32 and scores.tolist() == [0.5, -1.25, 3.0]
    assert wide.dtype == np.uint64 and wide.tolist() == [2**64 - 1, 0]
    assert metadata["a.flags"].numpy().dtype == np.bool_
    assert repr(metadata["tokenizer.ggml.tokens"]) == "<5 strings>"
    assert repr(metadata["tokenizer.ggml.scores"]) == "<3 x float32>"


def test_bad_array_items_raise_on_access(tmp_path: Path) -> None:
    tokens = Typed("string", [b"good", b"\xff\xfe", b"later"])
    path = write_gguf(tmp_path / "m.gguf", {"t": tokens, "flags": Typed("u8", [0, 1, 2])}, {})
    raw = path.read_bytes()
    # turn the u8 array into a bool array that holds a 2
    head = raw.index(b"flags") + 5 + 4
    path.write_bytes(raw[:head] + b"\7" + raw[head + 1 :])
    metadata = open_gguf(path).metadata
    assert metadata["t"][0] == "good" and metadata["t"][-1] == "later"
    with pytest.raises(
        GGUFError, match=r"m\.gguf: metadata key 't', item 1: found bytes b'\\xff\\xfe'.*UTF-8"
    ):
        list(metadata["t"])
    assert metadata["flags"][1] is True
    with pytest.raises(GGUFError, match=r"metadata key 'flags': found a bool that is neither"):
        metadata["flags"].numpy()


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.gguf", all_formats()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list(ARRAYS["tokenizer.ggml.tokens"])
    writer.add_token_scores(ARRAYS["tokenizer.ggml.scores"])
    writer.add_token_types(ARRAYS["tokenizer.ggml.token_type"])
    writer.add_bool("a.flag", True)
    for name, (fmt, shape, data) in tensors.items():
        kind = gguf.GGMLQuantizationType(FORMATS[fmt].ggml_type)
        raw = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file, reader = open_gguf(path), gguf.GGUFReader(path)
    same_bytes(file, tensors)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    lazy = (int, float, bool, str)
    ours = {key: entry if isinstance(entry, lazy) else list(entry) for key, entry in file.metadata.items()}
    assert ours == theirs
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.offset == tensor.data_offset and list(info.shape) == tensor.shape.tolist()[::-1]
        assert file.read(tensor.name).view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()


def test_large_vocabulary_parses_fast(tmp_path: Path) -> None:
    count = 262_144
    tokens = [f"▁token{index}" for index in range(count)]
    scores = np.arange(count, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", {"tokens": tokens, "scores": scores, "last": 1}, {})
    times = []
    for _ in range(3):
        start = time.perf_counter()
        metadata = open_gguf(path).metadata
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5
    assert metadata["tokens"][count - 1] == tokens[-1] and list(metadata["tokens"]) == tokens
    assert np.array_equal(metadata["scores"].numpy(), scores)


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


def test_failure_leaves_no_mapping_even_while_the_error_lives(tmp_path: Path) -> None:
    tensors = {name: packed("Q8_0", 4, 32) for name in "abc"}
    shards = write_split_gguf(tmp_path, "m", METADATA, tensors, [1, 1, 1])
    shards[2].write_bytes(shards[2].read_bytes()[:-40])
    with pytest.raises(GGUFError, match=r"m-00003-of-00003\.gguf: tensor 'c'") as caught:
        open_gguf(shards[0])
    assert caught.value.__traceback__ is not None
    assert not any(mapped(shard) for shard in shards)


@pytest.mark.parametrize("counts", [[9, 4, 5], [0, 17, 1], [18]])
def test_split_model_from_any_entry(tmp_path: Path, counts: list[int]) -> None:
    tensors = all_formats()
    shards = write_split_gguf(tmp_path, "model-Q4_K", METADATA, tensors, counts, alignment=64)
    for entry in (*shards, tmp_path):
        file = open_gguf(entry)
        assert file.shards == tuple(shards) and file.arch == "llama"
        assert file.metadata["a.text"] == METADATA["a.text"]
        same_bytes(file, tensors)
    assert open_gguf(shards[-1]).path == shards[-1]


def test_incomplete_splits(tmp_path: Path) -> None:
    tensors = {name: packed("Q8_0", 4, 32) for name in "abc"}
    shards = write_split_gguf(tmp_path, "m", METADATA, tensors, [1, 1, 1])
    good = [shard.read_bytes() for shard in shards]

    def refused(entry: Path, match: str) -> None:
        with pytest.raises(IncompleteShardsError, match=match) as caught:
            open_gguf(entry)
        assert str(tmp_path) in str(caught.value)
        for shard, data in zip(shards, good, strict=True):
            shard.write_bytes(data)

    for missing in range(3):
        shards[missing].unlink()
        pattern = (
            rf"found 2 of 3 shards, expected.*'m-0000{missing + 1}-of-00003\.gguf'.*Download the missing"
        )
        refused(shards[(missing + 1) % 3], pattern)
        shards[missing].unlink()
        refused(tmp_path, pattern)
    shards[1].write_bytes(good[2])
    refused(shards[0], r"00002-of-00003\.gguf: split model: found shard 3 of 3, expected shard 2 of 3")
    other = write_split_gguf(tmp_path, "other", METADATA, tensors, [2, 1])
    shards[1].write_bytes(other[1].read_bytes())
    refused(shards[0], r"found shard 2 of 2, expected shard 2 of 3")
    doubled = write_split_gguf(
        tmp_path, "doubled", METADATA, {"a": tensors["a"], "x": tensors["b"], "y": tensors["c"]}, [0, 1, 2]
    )
    shards[1].write_bytes(doubled[1].read_bytes())
    refused(shards[0], r"00002-of-00003\.gguf: split model: found tensor 'a', which an earlier shard has too")
    fewer = {"split.no": 1, "split.count": 3, "split.tensors.count": 3}
    shards[1].write_bytes(gguf_bytes(fewer, {}))
    refused(shards[2], r"found 2 tensors in 3 shards, expected 3 \('split.tensors.count'\)")
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(good[1])
    refused(renamed, r"found the file name 'renamed\.gguf', expected one that ends in -00002-of-00003\.gguf")
    assert open_gguf(shards[2]).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"split.no": 3, "split.count": 3}, r"'split.no': found 3, expected 0 to 2"),
        ({"split.no": -1, "split.count": 3}, r"'split.no': found -1"),
        ({"split.no": 1}, r"'split.no': found 1, expected 0 to 0"),
        ({"split.count": "3"}, r"'split.count': found '3', expected an integer"),
        ({"split.count": 2**32 - 1}, r"expected one that ends in -00001-of-4294967295\.gguf"),
        ({"split.count": 1, "split.tensors.count": 5}, r"found 0 tensors in 1 shards, expected 5"),
    ],
)
def test_contradictory_split_keys(tmp_path: Path, keys: dict[str, object], says: str) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", keys, {})
    with pytest.raises((GGUFError, IncompleteShardsError), match=says):
        open_gguf(path)


def test_paths(tmp_path: Path) -> None:
    def refused(path: Path, match: str) -> None:
        with pytest.raises(GGUFError, match=match):
            open_gguf(path)

    refused(
        tmp_path / "none.gguf",
        r"none\.gguf: path: found 'No such file or directory', expected a readable file",
    )
    refused(tmp_path, "directory: found no file that ends in .gguf")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "something that is not a file")
    refused(tmp_path / "a\x1b[2J", r"a\\x1b\[2J")
    tensors = {"w": packed("Q4_0", 2, 64)}
    good = write_gguf(tmp_path / "good.gguf", METADATA, tensors)
    link = tmp_path / "0123abcd.bin"
    link.symlink_to(good)
    for entry in (good, str(good), tmp_path, link):
        same_bytes(open_gguf(entry), tensors)
    write_gguf(tmp_path / "second.gguf", METADATA, tensors)
    refused(tmp_path, r"found 2 models: 'good\.gguf', 'second\.gguf', expected one model")


def test_names_are_checked_and_shown_safely(tmp_path: Path) -> None:
    nameless = open_gguf(write_gguf(tmp_path / "m.gguf", {"a": 1}, {"w": packed("Q4_0", 2, 64)}))
    with pytest.raises(GGUFError, match=r"m\.gguf: metadata key 'general\.architecture': found no such key"):
        _ = nameless.arch
    with pytest.raises(
        GGUFError, match=r"tensor 'v\\x1b': found no such tensor among 1, expected a name like 'w'"
    ):
        nameless.read("v\x1b")
    hostile = open_gguf(write_gguf(tmp_path / "h.gguf", {"general.architecture": "../\x1b\0" * 9999}, {}))
    assert hostile.arch == "../\x1b\0" * 9999
    assert repr(hostile).isprintable() and len(repr(hostile)) < 500 + len(str(tmp_path))


def test_unsupported_types_are_listed_once(tmp_path: Path) -> None:
    tensors = {f"good.{i}": packed("Q8_0", 2, 32) for i in range(3)}
    for kind, names in ((20, "ab"), (26, "c"), (28, "d"), (31, "e"), (2**32 - 1, "f")):
        tensors |= {f"bad.{name}": (kind, (2, 32), bytes(64)) for name in names}
    with pytest.raises(GGUFError) as caught:
        open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors))
    listed = (
        "6 unsupported tensors: found type 20 (IQ4_NL) in 'bad.a', 'bad.b'; type 26 (I32) in 'bad.c'; "
        "type 28 (F64) in 'bad.d'; type 31 in 'bad.e'; type 4294967295 in 'bad.f', expected types F32, F16"
    )
    assert listed in str(caught.value) and "good" not in str(caught.value)


def test_the_gguf_package_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    tensors = all_formats()
    same_bytes(open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors)), tensors)
    with pytest.raises(GGUFError, match="found type 20 in 'w'"):
        open_gguf(write_gguf(tmp_path / "bad.gguf", METADATA, {"w": (20, (2, 32), bytes(36))}))
