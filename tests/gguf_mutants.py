"""One small GGUF file and its broken variants: each named edit, and whether the reader may accept it.

The base file has 4 keys and 2 tensors, ``x.weight`` F32 [8] and ``y.weight`` Q4_K [2, 256], 32 bytes apart.
Its header is stated as bytes, not made by gguf_files.py, so the two check each other.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf_files import Tensor, gguf_bytes, string, tensor_info

HEADER = bytes.fromhex(
    "474755460300000002000000000000000400000000000000140000000000000067656e6572616c2e6172636869746563"
    "747572650800000005000000000000006c6c616d61110000000000000067656e6572616c2e616c69676e6d656e740400"
    "0000200000001500000000000000746f6b656e697a65722e67676d6c2e746f6b656e7309000000080000000300000000"
    "00000001000000000000006101000000000000006205000000000000003c756e6b3e11000000000000006c6c616d612e"
    "626c6f636b5f636f756e7404000000010000000800000000000000782e77656967687401000000080000000000000000"
    "00000000000000000000000800000000000000792e77656967687402000000000100000000000002000000000000000c"
    "0000002000000000000000000000000000000000000000000000000000000000"
)
# floats that are not NaN, then blocks of any bytes
X_BYTES = np.linspace(-3, 5, 8, dtype="<f4").tobytes()
Y_BYTES = np.random.default_rng(7).bytes(288)
BASE = HEADER + X_BYTES + Y_BYTES

# integer fields of the header: name -> (byte offset, size)
INTEGER_FIELDS = {
    "version": (4, 4),
    "n_tensors": (8, 8),
    "n_kv": (16, 8),
    "kv0.keylen": (24, 8),
    "kv0.type": (52, 4),
    "kv0.length": (56, 8),
    "kv1.keylen": (69, 8),
    "kv1.type": (94, 4),
    "kv1.value": (98, 4),
    "kv2.keylen": (102, 8),
    "kv2.type": (131, 4),
    "kv2.element_type": (135, 4),
    "kv2.count": (139, 8),
    "kv2.length0": (147, 8),
    "kv2.length1": (156, 8),
    "kv2.length2": (165, 8),
    "kv3.keylen": (178, 8),
    "kv3.type": (203, 4),
    "kv3.value": (207, 4),
    "t0.namelen": (211, 8),
    "t0.n_dims": (227, 4),
    "t0.dim0": (231, 8),
    "t0.type": (239, 4),
    "t0.offset": (243, 8),
    "t1.namelen": (251, 8),
    "t1.n_dims": (267, 4),
    "t1.dim0": (271, 8),
    "t1.dim1": (279, 8),
    "t1.type": (287, 4),
    "t1.offset": (291, 8),
}
SECTION_ENDS = (4, 8, 16, 24, 32, 52, 56, 69, 77, 94, 98, 102, 110, 131, 135, 178, 186, 203, 207, 211)
SECTION_ENDS += (219, 227, 231, 239, 243, 251, 259, 267, 271, 279, 287, 291, 299, 320, 352, 640)


class Mutant(NamedTuple):
    """``loads``: the file is legal (or harmless) and must load with the base file's values.
    ``says``: words that the error must contain, apart from the file's name."""

    family: str
    variant: str
    data: bytes
    loads: bool = False
    says: tuple[str, ...] = ()


def patched(offset: int, new: bytes) -> bytes:
    """The base file with ``new`` written over the bytes at ``offset``."""
    return BASE[:offset] + new + BASE[offset + len(new) :]


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def with_key(entry: bytes) -> bytes:
    """The base file with one more key (its complete bytes) before ``general.alignment``."""
    head = HEADER[:16] + u64(5) + HEADER[24:69] + entry + HEADER[69:299]
    return head + bytes(-len(head) % 32) + BASE[320:]


def one_tensor(name: bytes, tensor: Tensor) -> bytes:
    """The base file's keys with one tensor, whose data may be of any length."""
    fmt, shape, data = tensor
    head = HEADER[:8] + u64(1) + HEADER[16:211] + tensor_info(name, fmt, shape, 0)
    return head + bytes(-len(head) % 32) + data


def mutants() -> Iterator[Mutant]:
    """Every mutant; the families are those of the project's list of field faults."""
    yield Mutant("base", "unmodified", BASE, loads=True)
    yield Mutant("empty", "0", b"", says=("empty file",))
    for size in (3, 4, 8, 12, 16, 20, 23):
        yield Mutant("header_cut", str(size), BASE[:size])
    yield from _preamble()
    yield from _counts_and_lengths()
    yield from _arrays()
    yield from _alignments()
    yield from _names()
    yield from _tensors()
    yield from _ends()


def _preamble() -> Iterator[Mutant]:
    words = {
        b"FUGG": "swapped",
        b"GGML": "not a GGUF",
        b"tjgg": "GGJT",
        b"PK\3\4": "zip",
        b"\x80\4\x95\0": "pickle",
        bytes(4): "not a GGUF",
    }
    for magic, word in words.items():
        yield Mutant("magic", repr(magic), patched(0, magic), says=("magic", word))
    for version in (0, 1, 4, 2**32 - 1):
        yield Mutant("version", str(version), patched(4, u32(version)), says=(f"version {version}", "2 or 3"))
    yield Mutant("version", "2", patched(4, u32(2)), loads=True)
    yield Mutant("version", "big-endian", patched(4, u32(0x3000000)), says=("big-endian",))


def _counts_and_lengths() -> Iterator[Mutant]:
    for count in (0, 1, 3, 2**31, 2**32, 2**32 + 2, 2**63 - 1, 2**63, 2**64 - 1):
        says = ("padding behind the tensor table",) if count < 2 else (str(count),)
        yield Mutant("n_tensors", hex(count), patched(8, u64(count)), says=says)
    for count in (0, 3, 5, 2**31, 2**32, 2**32 + 4, 2**63 - 1, 2**63, 2**64 - 1):
        yield Mutant("n_kv", hex(count), patched(16, u64(count)))
    for length in (0, 0x13, 0x15, 0x10000, 2**31, 2**32, 2**63, 2**64 - 1, 0x281):
        yield Mutant("key_len", hex(length), patched(24, u64(length)))
    yield Mutant("key_bytes", "ff", patched(32, b"\xff"), says=("metadata key 0", "UTF-8"))
    yield Mutant("key_bytes", "00", patched(32, b"\0"), says=("metadata key 0", "\\x00eneral", "printable"))
    for kind in (0xD, 0xFF, 2**32 - 1, 2**31):
        says = ("llama.block_count", f"value type {kind}")
        yield Mutant("value_type", hex(kind), patched(203, u32(kind)), says=says)
    for length in (2**31, 2**32, 2**63, 2**64 - 1, 0x280):
        says = ("general.architecture", f"bytes 64 to {64 + length}", "byte 640")
        yield Mutant("string_len", hex(length), patched(56, u64(length)), says=says)
    yield Mutant("bool_byte", "2", with_key(string("a") + u32(7) + b"\2"), says=("'a'", "bool of value 2"))
    yield Mutant(
        "duplicate_key", "llama.block_count", with_key(HEADER[178:211]), says=("llama.block_count", "twice")
    )


def _arrays() -> Iterator[Mutant]:
    key = "tokenizer.ggml.tokens"
    for kind in (0xD, 2**32 - 1, 9):
        yield Mutant("array_type", hex(kind), patched(135, u32(kind)), says=(key,))
    for count in (0, 2, 4, 2**31, 2**32, 2**61, 2**62, 2**63, 2**64 - 1):
        says = (key, f"an array of {count} strings") if count > 4 else ()
        yield Mutant("array_count", hex(count), patched(139, u64(count)), says=says)
    for kind in (0, 7, 4, 10):
        for count in (2**30, 2**40, 2**61, 2**63, 2**64 - 1):
            data = with_key(string("a") + u32(9) + u32(kind) + u64(count))
            yield Mutant("array_short", f"type {kind} count {count}", data, says=("'a'", str(count)))
    for depth in (3, 64, 1000, 200_000):
        nested = string("a") + u32(9) + (u32(9) + u64(1)) * depth + u32(0) + u64(0)
        yield Mutant("nested", str(depth), with_key(nested), says=("'a'", "array of arrays"))
    fan = string("a") + u32(9) + u32(9) + u64(2**20) + (u32(0) + u64(0)) * 2**20
    yield Mutant("nested", "fan", with_key(fan), says=("'a'", "array of arrays"))


def _alignments() -> Iterator[Mutant]:
    for number in (0, 1, 2, 4, 3, 0x1F, 0x21, 0x18):
        says = ("general.alignment", f"found {number},", "power of two")
        yield Mutant("align_value", hex(number), patched(98, u32(number)), says=says)
    for number in (8, 16):
        says = ("behind the last tensor",)
        yield Mutant("align_value", hex(number), patched(98, u32(number)), says=says)
    for number in (0x40, 0x100000, 2**30, 2**31, 2**32 - 1):
        yield Mutant("align_value", hex(number), patched(98, u32(number)))
    typed = {"u64": u32(10) + u64(32), "i32": u32(5) + struct.pack("<i", -32), "str": u32(8) + string("32")}
    for kind, entry in typed.items():
        head = HEADER[:94] + entry + HEADER[102:299]
        data = head + bytes(-len(head) % 32) + BASE[320:]
        yield Mutant("align_type", kind, data, says=("general.alignment", "value type"))
    tensors = {"x.weight": ("F32", (8,), X_BYTES), "y.weight": ("Q4_K", (2, 256), Y_BYTES)}
    for number in (8, 16, 64, 4096):
        data = gguf_bytes({"general.architecture": "llama"}, tensors, alignment=number)
        yield Mutant("align_valid", str(number), data, loads=True)


def _names() -> Iterator[Mutant]:
    for length in (0, 7, 0x3F, 9, 0x40, 0x41, 2**32, 2**63, 2**64 - 1):
        yield Mutant("name_len", hex(length), patched(211, u64(length)))
    tensor = ("F32", (8,), X_BYTES)
    for length in (63, 64):
        yield Mutant("name", str(length), one_tensor(b"n" * length, tensor), loads=True)
    yield Mutant(
        "name", "65", one_tensor(b"n" * 65, tensor), says=("name of tensor 0", "65 bytes", "at most 64")
    )
    yield Mutant("name", "utf8", patched(219, b"\xff"), says=("name of tensor 0", "UTF-8"))
    yield Mutant("name", "empty", one_tensor(b"", tensor), says=("name of tensor 0", "''", "printable"))
    escape = one_tensor(b"\x1b[2J\n", tensor)
    yield Mutant("name", "escape", escape, says=("name of tensor 0", "\\x1b[2J\\n"))
    yield Mutant("name", "duplicate", patched(259, b"x"), says=("'x.weight'", "twice"))


def _tensors() -> Iterator[Mutant]:
    for dim in (0, 9, 2**31, 2**32, 2**61, 2**62, 2**63, 2**64 - 1):
        yield Mutant("dim0", hex(dim), patched(231, u64(dim)), says=("'x.weight'",))
    # file order: the innermost dimension first
    cases = [("Q4_K", dims) for dims in ([255, 2], [257, 2], [128, 4], [2, 256], [256, 2**55], [2**56, 256])]
    cases += [("Q4_K", dims) for dims in ([256, 3], [512, 2], [256, 0], [0, 256])]
    cases += [("Q8_0", dims) for dims in ([2**32 + 64, 2], [64, 2**32 + 2])]
    for fmt, dims in cases:
        says = ("'w'", str(dims))
        if fmt == "Q4_K" and dims[0] % 256:
            says += ("blocks of 256",)
        yield Mutant(f"{fmt}_dims", str(dims), one_tensor(b"w", (fmt, dims[::-1], Y_BYTES)), says=says)
    for rank in (0, 5, 2**32 - 1):
        yield Mutant("n_dims", str(rank), patched(227, u32(rank)), says=("'x.weight'", f"{rank} dimensions"))
    for kind in (1, 3, 8, 13, 14, 30):
        yield Mutant("tensor_type", str(kind), patched(287, u32(kind)), says=("'y.weight'",))
    yield Mutant("tensor_type", "2", patched(287, u32(2)), loads=True)
    known = {
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        20: "IQ4_NL",
        23: "IQ4_XS",
        26: "I32",
        28: "F64",
        39: "MXFP4",
    }
    unknown = (4, 5, 31, 33, 36, 38, 42, 43, 100, 153, 255, 2**31 - 1, 2**31, 2**32 - 1)
    for kind in (*known, *unknown):
        label = f"{kind} ({known[kind]})" if kind in known else str(kind)
        says = ("'y.weight'", f"type {label}", "Q4_K")
        yield Mutant("unsupported_type", str(kind), patched(287, u32(kind)), says=says)
    for offset in (1, 16, 33):
        yield Mutant(
            "offset", str(offset), patched(291, u64(offset)), says=("'y.weight'", f"offset {offset}")
        )
    yield Mutant("offset", "overlap", patched(291, u64(0)), says=("'x.weight'", "'y.weight'", "overlap"))
    for offset in (64, 2**32, 2**63, 2**64 - 32):
        says = ("'y.weight'", f"bytes {320 + offset} to {608 + offset}", "byte 640")
        yield Mutant("offset", hex(offset), patched(291, u64(offset)), says=says)


def _ends() -> Iterator[Mutant]:
    for cut in (1, 31, 144, 288, 289, 320):
        says = ("'y.weight'" if cut <= 288 else "weight'", f"byte {640 - cut}")
        yield Mutant("data_cut", str(cut), BASE[:-cut], says=says)
    yield Mutant("data_cut", "pad", BASE[:299])
    yield Mutant(
        "trailing", "garbage", BASE + bytes(range(1, 251)) * 4, says=("behind the last tensor", "640")
    )
    yield Mutant("trailing", "zeros", BASE + bytes(1000), loads=True)
    yield Mutant("concat", "twice", BASE + BASE, says=("behind the last tensor", "640"))
    for end in SECTION_ENDS:
        for size in (end - 1, end, end + 1):
            if size < len(BASE):
                yield Mutant("truncated", str(size), BASE[:size])
    for share in (0.1, 0.5, 0.9, 0.9999):
        yield Mutant("truncated", f"{share:.2%}", BASE[: int(len(BASE) * share)])
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n"
    yield Mutant("foreign", "lfs", lfs, says=("Git LFS",))
    yield Mutant("foreign", "html", b"<!DOCTYPE html>\n<html><body>404</body></html>\n", says=("HTML",))
    yield Mutant("foreign", "pickle", b"\x80\x02}q\x00.", says=("pickle",))
    yield Mutant("foreign", "zip", b"PK\3\4" + bytes(100), says=("zip",))
    yield Mutant("foreign", "text", b"just a text", says=("not a GGUF",))
    yield Mutant("foreign", "zeros", bytes(4096), says=("not a GGUF",))
