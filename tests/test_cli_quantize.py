"""The verb quantize: a dense model becomes a directory that loads, and the numbers printed are right."""

import json

import pytest
import torch
from arch_fixtures import FIXTURES
from command_line import call, schema
from gguf_files import write_gguf
from hf_directories import write_hf_directory
from random_models import HIDDEN, LAYERS, metadata, tensors, write_random_model
from tiny_models import weight, write_tiny_llama

import realizar_torch as rt
from realizar_torch.cli import build_parser


@pytest.fixture
def dense(tmp_path):
    return write_random_model(tmp_path / "dense.gguf", "llama", tied=False)


def test_a_gguf_file_becomes_a_directory(dense, tmp_path, capsys):
    code, out, _ = call(capsys, "quantize", dense, tmp_path / "out", "--format", "Q8_0", "--json")
    record = json.loads(out)
    assert code == 0 and schema(record) == {
        "source": "str",
        "directory": "str",
        "format": "str",
        "bytes_before": "int",
        "bytes_after": "int",
        "files": ["str"],
        "tensors": [
            {"name": "str", "format_before": "str", "format": "str", "shape": ["int"], "bytes": "int"}
        ],
    }
    source = rt.open_gguf(dense)
    assert record["bytes_before"] == sum(info.nbytes for info in source.tensors.values())
    for row in record["tensors"]:
        matrix = len(row["shape"]) == 2
        assert row["format"] == ("Q8_0" if matrix else "F32") and row["format_before"] == "F32"
        assert row["shape"] == list(source.tensors[row["name"]].shape)
    assert record["bytes_after"] == sum(row["bytes"] for row in record["tensors"])
    assert record["files"] == ["model.safetensors"]
    saved, _ = rt.load(tmp_path / "out")
    direct, _ = rt.load(dense, quantize="Q8_0")
    for (name, tensor), other in zip(saved.state_dict().items(), direct.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_a_directory_of_transformers_in_several_files(tmp_path, capsys):
    write_hf_directory(tmp_path / "hf", "gemma3_text")
    out_dir = tmp_path / "out"
    options = ("--format", "Q5_0", "--max-shard-size", "40kB")
    code, out, _ = call(capsys, "quantize", tmp_path / "hf", out_dir, *options)
    before, after, last = out.splitlines()
    assert code == 0 and before.startswith("before") and "F32" in before
    assert "49 Q5_0" in after and "1 Q8_0" in after
    assert last.startswith(f"saved to {out_dir}, ") and len(list(out_dir.glob("*.safetensors"))) > 2
    code, out, _ = call(capsys, "check", "-m", out_dir)
    assert code == 0 and "would load" in out


@pytest.mark.parametrize(
    ("size", "words"),
    [("5 gigs", "'5 gigs' is no size; expected a number of bytes, or one with KB"), ("0GB", "is no size")],
)
def test_a_size_of_files_that_is_none_is_refused(dense, tmp_path, capsys, size, words):
    with pytest.raises(SystemExit):
        call(capsys, "quantize", dense, tmp_path / "out", "--format", "Q8_0", "--max-shard-size", size)
    assert words in capsys.readouterr().err


def test_numbers_that_are_none_are_refused_without_names_of_functions(capsys):
    for option in ("--max-new-tokens", "--max-seq-len", "--seed"):
        with pytest.raises(SystemExit):
            call(capsys, "generate", option, "1x")
        assert f"{option}: '1x' is no whole number" in capsys.readouterr().err


def test_errors_leave_nothing(dense, tmp_path, capsys):
    for words, *arguments in (
        ("unknown format 'Q4_K_M'", dense, tmp_path / "out", "--format", "Q4_K_M"),
        ("unknown format 'Q9'", write_q8(tmp_path), tmp_path / "out", "--format", "Q9"),
        ("no dense matrix|already", write_q8(tmp_path), tmp_path / "out", "--format", "Q4_0"),
        ("not an empty directory", dense, tmp_path, "--format", "Q8_0"),
    ):
        code, out, err = call(capsys, "quantize", *arguments)
        assert code == 2 and out == "" and any(word in err for word in words.split("|")), err
        assert not (tmp_path / "out").exists()


def write_q8(tmp_path):
    return write_random_model(tmp_path / "q8.gguf", "llama", fmt="Q8_0")


def test_generate_runs_a_saved_directory(tmp_path, capsys):
    model, _ = rt.load(write_tiny_llama(tmp_path / "tiny.gguf"))
    rt.save(model, tmp_path / "saved")
    answers = [
        call(capsys, "generate", "the cat", "-n", 8, "--json", "-m", tmp_path / name)[1]
        for name in ("tiny.gguf", "saved")
    ]
    first, second = (json.loads(answer)["token_ids"] for answer in answers)
    assert first == second and len(first) == 8


def test_info_tells_of_directories(tmp_path, capsys):
    write_hf_directory(tmp_path / "hf", shard="100KB")
    tokenizer = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    padded = json.dumps(tokenizer) + " " * 100_000
    (tmp_path / "hf" / "tokenizer.json").write_text(padded)
    rt.save(rt.load(tmp_path / "hf", quantize="Q8_0")[0], tmp_path / "saved")
    for name, fmt in (("hf", "F32"), ("saved", "Q8_0")):
        code, out, _ = call(capsys, "info", "-m", tmp_path / name, "--json")
        record = json.loads(out)
        shards = list((tmp_path / name).glob("*.safetensors"))
        assert code == 0 and record["architecture"] == "llama" and record["shards"] == len(shards)
        assert record["file_bytes"] == sum(shard.stat().st_size for shard in shards)
        assert record["formats"][0]["format"] == fmt
        assert record["metadata"]["tokenizer.huggingface.json"] == {"text_of": len(padded)}
        code, out, _ = call(capsys, "info", "-m", tmp_path / name)
        assert code == 0 and f"[{len(padded)} characters]" in out and fmt in out


def write_odd(path, fmt="F16", inner=100):
    """The dense llama with an MLP whose rows are no whole blocks of any format."""
    entries = tensors("llama", fmt, True, False, False)
    shapes = {"ffn_gate": (inner, HIDDEN), "ffn_up": (inner, HIDDEN), "ffn_down": (HIDDEN, inner)}
    for seed, name in enumerate(entries):
        if (stem := name.split(".")[-2]) in shapes:
            entries[name] = weight(fmt, *shapes[stem], seed, spread=1.0)
    return write_gguf(path, metadata("llama") | {"llama.feed_forward_length": inner}, entries)


def test_what_stays_dense_is_named_and_does_not_grow(tmp_path, capsys):
    source = write_odd(tmp_path / "odd.gguf")
    code, out, err = call(capsys, "quantize", source, tmp_path / "out", "--format", "Q8_0", "--json")
    rows = {row["name"]: row for row in json.loads(out)["tensors"]}
    assert code == 0 and err.count("warning: ") == 1
    assert (
        f"{LAYERS} of the {7 * LAYERS + 1} matrices" in err and "blk.0.ffn_down.weight (rows of 100)" in err
    )
    assert rows["blk.0.ffn_down.weight"]["format"] == "F16"
    assert rows["blk.0.ffn_up.weight"]["format"] == "Q8_0"
    before = rt.open_gguf(source).tensors
    assert all(row["bytes"] <= before[name].nbytes for name, row in rows.items())
    saved, direct = rt.load(tmp_path / "out")[0], rt.load(source)[0]
    for left, right in zip(saved.layers, direct.layers, strict=True):
        assert torch.equal(left.mlp.down_proj.weight, right.mlp.down_proj.weight)
        assert torch.equal(left.attn_norm.weight, right.attn_norm.weight)


def test_a_model_of_which_nothing_can_be_encoded_is_refused(tmp_path, capsys):
    source = FIXTURES / "gpt2.gguf"
    code, out, err = call(capsys, "quantize", source, tmp_path / "out", "--format", "Q8_0")
    assert code == 2 and out == "" and "nothing would be encoded" in err, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("700", 700), ("3KB", 3_000), ("2mb", 2_000_000), ("5GB", 5 * 10**9)]
)
def test_sizes_of_files_are_decimal(text, size):
    args = build_parser().parse_args(["quantize", "a", "b", "--format", "Q8_0", "--max-shard-size", text])
    assert args.max_shard_size == size


def test_the_help_names_every_format_and_the_defaults(capsys):
    for verb, told in (
        ("quantize", rt.supported_formats()),
        ("bench", ("(default: 512)", "(default: 128)", "(default: 5)")),
        ("perplexity", ("(default: 512)",)),
    ):
        with pytest.raises(SystemExit):
            build_parser().parse_args([verb, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert [words for words in told if words not in out] == []
