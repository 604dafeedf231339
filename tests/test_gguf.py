"""Sound GGUF files: exact bytes and values, lazy metadata, and what cannot be opened at all."""

import os
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Tensor, Typed, assert_tensors, packed, plain, write_gguf

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import GGUFError
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


def all_formats() -> dict[str, Tensor]:
    """One or two tensors of each format, of one to three dimensions, sizes that need padding between them."""
    tensors = {f"{fmt.name}.weight": packed(fmt.name, 3, 2 * fmt.block_size) for fmt in PACKED_FORMATS}
    tensors["row.weight"] = packed("Q5_0", 96)
    tensors["experts.weight"] = packed("Q4_K", 2, 3, 256)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors[f"{dtype}.weight"] = plain(torch.randn(5, 7).to(dtype))
        tensors[f"{dtype}.bias"] = plain(torch.randn(3).to(dtype))
    return tensors


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_every_format_version_and_alignment(tmp_path: Path, version: int, alignment: int) -> None:
    tensors = all_formats()
    path = write_gguf(tmp_path / "m.gguf", METADATA, tensors, version=version, alignment=alignment)
    file = open_gguf(path)
    assert_tensors(file, tensors)
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
    assert_tensors(file, tensors)
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
        assert_tensors(open_gguf(entry), tensors)
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
    assert_tensors(open_gguf(write_gguf(tmp_path / "m.gguf", METADATA, tensors)), tensors)
    with pytest.raises(GGUFError, match="found type 20 in 'w'"):
        open_gguf(write_gguf(tmp_path / "bad.gguf", METADATA, {"w": (20, (2, 32), bytes(36))}))
