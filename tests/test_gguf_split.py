"""Split GGUF models: the same tensors from every entry point; an incomplete or mixed set is refused."""

from pathlib import Path

import pytest
from gguf_files import assert_tensors, gguf_bytes, packed, write_gguf, write_split_gguf

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import GGUFError, IncompleteShardsError
from realizar_torch.formats import PACKED_FORMATS

METADATA = {"general.architecture": "llama", "a.text": "only in the first shard"}


@pytest.mark.parametrize("counts", [[9, 4, 7], [0, 19, 1], [20]])
def test_split_model_from_any_entry(tmp_path: Path, counts: list[int]) -> None:
    tensors = {
        f"{fmt.name}.{i}": packed(fmt.name, 3, fmt.block_size, seed=i)
        for fmt in PACKED_FORMATS
        for i in (0, 1)
    }
    shards = write_split_gguf(tmp_path, "model-Q4_K", METADATA, tensors, counts, alignment=64)
    for entry in (*shards, tmp_path):
        file = open_gguf(entry)
        assert file.shards == tuple(shards) and file.arch == "llama"
        assert file.metadata["a.text"] == METADATA["a.text"]
        assert_tensors(file, tensors)
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
