"""Broken GGUF files: one error that names file, place, found and expected; at once and without memory."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_files import Typed, gguf_bytes
from gguf_mutants import BASE, HEADER, INTEGER_FIELDS, X_BYTES, Y_BYTES, Mutant, mutants

from realizar_torch.checkpoint.gguf import GGUFFile, open_gguf
from realizar_torch.errors import GGUFError

MUTANTS = list(mutants())
# a hit on these may change what a tensor is, so its bytes need not be the base file's
TENSOR_FIELDS = ("n_dims", "dim0", "dim1", ".type", "offset")


def contents(file: GGUFFile) -> list[bytes]:
    """The bytes of all tensors, in the order of the table."""
    return [file.read(name).view(torch.uint8).numpy().tobytes() for name in file.tensors]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.family}-{mutant.variant}")
def test_mutant(tmp_path: Path, mutant: Mutant) -> None:
    path = tmp_path / "file.gguf"
    path.write_bytes(mutant.data)
    start = time.perf_counter()
    if mutant.loads:
        found = contents(open_gguf(path))
        assert found in ([X_BYTES, Y_BYTES], [X_BYTES])
        return
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    # a hang guard: measured below 2 ms
    assert time.perf_counter() - start < 1
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "found" in message and ", expected " in message
    assert message.isprintable() and len(message) < 1500
    for words in mutant.says:
        assert words in message
    base = tmp_path / "base.bin"
    base.write_bytes(BASE)
    assert contents(open_gguf(base)) == [X_BYTES, Y_BYTES]


def test_mutants_need_no_memory(tmp_path: Path) -> None:
    """All mutants in a process that may grow by 64 MiB: a large allocation would be a MemoryError."""
    paths = []
    for index, mutant in enumerate(MUTANTS):
        paths.append(tmp_path / f"{index}.gguf")
        paths[-1].write_bytes(mutant.data)
    script = """
import json, re, resource, sys
from pathlib import Path
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import GGUFError
import gguf
paths = json.load(sys.stdin)
used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
loaded = []
for index, path in enumerate(paths):
    try:
        open_gguf(path)
        loaded.append(index)
    except GGUFError:
        pass
print(json.dumps(loaded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([str(p) for p in paths]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [index for index, mutant in enumerate(MUTANTS) if mutant.loads]


def integer_edits() -> Iterator[tuple[int, bytes]]:
    """(offset, new bytes) for every integer field and every interesting value."""
    for offset, size in INTEGER_FIELDS.values():
        value = int.from_bytes(BASE[offset : offset + size], "little")
        top = 1 << (8 * size)
        values = {0, 1, value - 1, value + 1, 2**8 - 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32}
        values |= {2**32 + value, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - value, 2**64 - 1}
        for new in sorted({new % top for new in values} - {value}):
            yield offset, new.to_bytes(size, "little")


def bit_flips() -> Iterator[tuple[int, bytes]]:
    for offset in range(len(HEADER)):
        for bit in range(8):
            yield offset, bytes([BASE[offset] ^ (1 << bit)])


def in_tensor_field(offset: int) -> bool:
    return any(
        start <= offset < start + size
        for name, (start, size) in INTEGER_FIELDS.items()
        if name.startswith("t") and name.endswith(TENSOR_FIELDS)
    )


@pytest.mark.parametrize("edits", [integer_edits, bit_flips])
def test_single_edits(tmp_path: Path, edits) -> None:
    """Whatever still loads has the base file's tensor bytes, unless the edit hit what a tensor is."""
    loaded = 0
    for number, (offset, new) in enumerate(edits()):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(BASE[:offset] + new + BASE[offset + len(new) :])
        try:
            file = open_gguf(path)
        except GGUFError:
            continue
        finally:
            path.unlink()
        loaded += 1
        if not in_tensor_field(offset):
            assert contents(file) == [X_BYTES, Y_BYTES], (offset, new)
    # some edits are harmless (a letter of a name, the block count): the loop did reach the comparison
    assert loaded > 10


def test_random_edits(tmp_path: Path) -> None:
    """Several bytes of a richer header at once: a GGUFError, or a file that can be read in full."""
    metadata = {
        "general.architecture": "llama",
        "tokens": ["<s>", "▁a", "b"],
        "scores": [0.5, 1.5],
        "flags": [True, False],
        "wide": Typed("u64", [1, 2]),
        "text": "some text",
        "bool": True,
    }
    base = gguf_bytes(metadata, {"x": ("F32", (8,), X_BYTES), "y": ("Q4_K", (2, 256), Y_BYTES)}, alignment=64)
    end = len(base) - len(Y_BYTES) - 64
    dice = random.Random(1234)
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(6000):
        data = bytearray(base)
        for _ in range(dice.choice((1, 1, 2, 3, 8))):
            data[dice.randrange(end)] = dice.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        if dice.random() < 0.2:
            del data[dice.randrange(len(data)) :]
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        try:
            file = open_gguf(path)
            contents(file)
            for entry in file.metadata.values():
                if not isinstance(entry, int | float | str):
                    list(entry)
            outcomes["loaded"] += 1
        except GGUFError:
            outcomes["refused"] += 1
        finally:
            path.unlink()
    assert min(outcomes.values()) > 300
