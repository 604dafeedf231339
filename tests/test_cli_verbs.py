"""The verbs info, check, bench, perplexity and doctor on a tiny model: what they print, and their JSON."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import call, exact, schema
from gguf_files import write_gguf, write_split_gguf
from hf_reference import reference_model
from tiny_models import tiny_metadata, tiny_tensors, write_tiny_llama

from realizar_torch import diagnosis, evaluation
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.diagnosis.parity import Parity


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    return partial(call, capsys)


def test_info_prints_metadata_formats_and_memory(run, tiny):
    code, out, err = run("info", tiny)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{tiny}: llama, 1.26 M parameters, 1.00 MiB in 1 file(s)"
    for line in (
        "  llama.block_count                       2",
        "  tokenizer.ggml.tokens                   [273 items]",
        # 2 of 512 x 256 in 144 bytes per 256
        "  Q4_K           2        262144        0.14          4.50",
        "  F32            5          1280        0.00         32.00",
        # 2 layers, keys and values, 2 heads of 32, 128 positions, 4 bytes
        "  KV cache       0.12 MiB for 128 positions in fp32",
    ):
        assert line in out.splitlines()


@pytest.mark.parametrize("verb", ["info", "check"])
def test_the_file_may_be_an_option_as_in_other_verbs(run, tiny, verb, capsys):
    assert run(verb, "-m", tiny) == run(verb, "--model", tiny) == run(verb, tiny)
    with pytest.raises(SystemExit):
        run(verb, tiny, "-m", tiny)
    assert "not allowed with argument" in capsys.readouterr().err


def test_info_json(run, tiny):
    record = json.loads(run("info", tiny, "--json")[1])
    metadata = record.pop("metadata")
    assert schema(record) == {
        "file": "str",
        "file_bytes": "int",
        "shards": "int",
        "architecture": "str",
        "parameters": "int",
        "formats": [
            {
                "format": "str",
                "tensors": "int",
                "parameters": "int",
                "bytes": "int",
                "bits_per_weight": "float",
            }
        ],
        "tensors": [{"name": "str", "format": "str", "shape": ["int"], "bytes": "int"}],
        "memory": {"weights": "int", "kv_cache": "int", "kv_cache_positions": "int"},
    }
    assert metadata["llama.context_length"] == 128
    assert metadata["tokenizer.ggml.tokens"] == {"array_of": 273}
    assert record["file_bytes"] == tiny.stat().st_size
    assert record["memory"]["weights"] == sum(tensor["bytes"] for tensor in record["tensors"])
    assert record["memory"]["kv_cache"] == 2 * 2 * 2 * 32 * 128 * 4


def test_check_approves_a_good_file(run, tiny):
    assert run("check", tiny) == (0, f"{tiny} would load\n", "")
    record = {"file": str(tiny), "loads": True, "problems": [], "notes": []}
    assert json.loads(run("check", tiny, "--json")[1]) == record


def test_check_tells_what_files_do_not(run, tmp_path):
    """A window that the file hides, LongRoPE's two sets of factors."""
    fixtures = Path(__file__).parent / "fixtures"
    path = write_tiny_llama(tmp_path / "m.gguf", metadata={"llama.context_length": 32768})
    (note,) = json.loads(run("check", path, "--json")[1])["notes"]
    assert 'config={"llama.attention.sliding_window": N}' in note
    assert f"  note: {note}\n" in run("check", path)[1]
    (note,) = json.loads(run("check", fixtures / "phi3-long.gguf", "--json")[1])["notes"]
    assert "above 16" in note
    assert json.loads(run("check", fixtures / "gemma3.gguf", "--json")[1])["notes"] == []


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for message in messages %}{{ message.content }}",
            "is not valid jinja2: Unexpected end of template",
        ),
        ("{{ messages[0].parts[0].text }}", "failed: UndefinedError"),
        (
            "{% if messages[1] %}{{ raise_exception('one at a time') }}{% endif %}",
            "failed: TemplateError: one",
        ),
        ("{% if false %}{{ messages }}{% endif %}", "the prompt has no tokens"),
    ],
)
def test_check_notes_a_chat_template_of_no_use(run, tmp_path, template, reason):
    path = write_tiny_llama(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": template})
    code, out, err = run("check", path)
    assert (code, err) == (0, "")
    verdict, note = out.splitlines()
    assert verdict == f"{path} would load" and note.startswith("  note: no chat with it (") and reason in note
    base = write_tiny_llama(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    assert run("check", base)[1] == f"{base} would load\n"


def test_check_names_every_problem_at_once(run, tmp_path):
    tensors = tiny_tensors()
    missing = [name for name in tensors if ".ffn_" in name]
    for name in missing:
        del tensors[name]
    tensors["blk.0.surprise.weight"] = tensors["output_norm.weight"]
    metadata = tiny_metadata() | {"tokenizer.ggml.model": "no such model"}
    path = write_gguf(tmp_path / "bad.gguf", metadata, tensors)
    code, out, err = run("check", path)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == f"{path} would not load:"
    assert len(lines) == 1 + len(missing) + 1 + 1
    for word in (*missing, "blk.0.surprise.weight", "no such model"):
        assert sum(word in line for line in lines) == 1
    record = json.loads(run("check", path, "--json")[1])
    assert record["loads"] is False and [f"  - {problem}" for problem in record["problems"]] == lines[1:]


def test_check_of_a_directory_gives_a_verdict_for_each_model(run, tiny, tmp_path):
    (tmp_path / "below").mkdir()
    good = write_tiny_llama(tmp_path / "below" / "good.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    # whole shards below, the second of two alone, a projector, a Hugging Face directory without its weights
    counts = [10, len(tiny_tensors()) - 10]
    whole = write_split_gguf(tmp_path / "below", "whole", tiny_metadata(), tiny_tensors(), counts)[0]
    missing, shard = write_split_gguf(tmp_path, "part", tiny_metadata(), tiny_tensors(), counts)
    missing.unlink()
    (tmp_path / "mmproj.gguf").write_bytes(b"")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    foreign = write_gguf(tmp_path / "t5.gguf", {"general.architecture": "t5"}, {})
    # a good one behind bad ones does not make up for them
    last = write_tiny_llama(tmp_path / "z.gguf")
    code, out, _ = run("check", tmp_path, "--json")
    records = {Path(r["file"]): r["problems"] for r in map(json.loads, out.splitlines())}
    assert code == 1 and list(records) == [good, whole, cut, tmp_path / "hf", shard, foreign, last]
    assert [path for path in records if not records[path]] == [good, whole, last]
    # what is supported instead
    assert "'t5'" in records[foreign][0] and "llama" in records[foreign][0] and "qwen2" in records[foreign][0]
    lines = run("check", tmp_path)[1].splitlines()
    assert [line for line in lines if not line.startswith("  - ")] == [
        f"{path} would not load:" if records[path] else f"{path} would load" for path in records
    ]
    assert run("check", tmp_path / "below") == (0, f"{good} would load\n{whole} would load\n", "")
    (tmp_path / "empty").mkdir()
    code, _, err = run("check", tmp_path / "empty")
    assert code == 2 and "holds no model" in err


def test_check_of_a_damaged_file_is_one_problem(run, tiny, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:-1000])
    code, out, _ = run("check", path, "--json")
    assert code == 1
    assert len(json.loads(out)["problems"]) == 1


def test_bench_prints_llama_bench_rows(run, tiny):
    code, out, _ = run("bench", "--model", tiny, "-p", 16, "-n", 8, "-r", 2)
    header, rule, prompt, generation = out.splitlines()
    assert code == 0
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    assert cells == ["model", "size", "params", "backend", "activations", "threads", "test", "t/s", "GB/s"]
    assert set(rule) == set("|-: ")
    common = r"\| +llama BF16 \| 0\.99 MiB \| 1\.26 M \| +cpu \| +int8 \| +\d+ \| "
    assert re.fullmatch(common + r"pp16 \| +\d+\.\d\d ± \d+\.\d\d \| +\|", prompt)
    memory = r" +\d+\.\d \(\d+% of \d+\.\d\)"
    assert re.fullmatch(common + r" tg8 \| +\d+\.\d\d ± \d+\.\d\d \|" + memory + r" \|", generation)


def test_bench_json(run, tiny):
    code, out, _ = run(
        "bench", "--model", tiny, "-p", 16, "-n", 8, "-r", 3, "--json", "--activations", "float"
    )
    records = json.loads(out)
    assert code == 0
    assert schema(records[0]) == {
        "model_filename": "str",
        "model_type": "str",
        "model_size": "int",
        "model_n_params": "int",
        "backend": "str",
        "activations": "str",
        "n_threads": "int",
        "cpu_info": "str",
        "versions": {"realizar_torch": "str", "torch": "str"},
        "test": "str",
        "n_prompt": "int",
        "n_gen": "int",
        "avg_ns": "int",
        "stddev_ns": "int",
        "avg_ts": "float",
        "stddev_ts": "float",
        "samples_ns": ["int"],
        "samples_ts": ["float"],
    }
    assert schema(records[1]) == schema(records[0]) | {"read_bytes": "int", "bandwidth": "float"}
    assert [(r["test"], r["n_prompt"], r["n_gen"]) for r in records] == [("pp16", 16, 0), ("tg8", 0, 8)]
    for record in records:
        tokens = record["n_prompt"] + record["n_gen"]
        assert len(record["samples_ns"]) == 3
        for nanoseconds, rate in zip(record["samples_ns"], record["samples_ts"], strict=True):
            assert rate * nanoseconds / 1e9 == pytest.approx(tokens, rel=1e-3)


def test_json_has_null_for_what_is_no_number(run, tmp_path):
    """A reader that keeps to the standard fails at NaN."""
    unusual = {"general.nan": math.nan, "general.infinite": -math.inf, "general.finite": 0.5}
    path = write_tiny_llama(tmp_path / "m.gguf", metadata=unusual)
    code, out, _ = run("info", path, "--json")
    metadata = json.loads(out, parse_constant=pytest.fail)["metadata"]
    assert code == 0
    assert {key: metadata[key] for key in unusual} == dict(zip(unusual, (None, None, 0.5), strict=True))


def test_json_of_doctor_has_null_for_an_error_that_is_no_number(run, monkeypatch):
    broken = Parity("cpu", "linear", "Q4_K", "1x256", 1, math.inf)
    monkeypatch.setattr(diagnosis, "_checks", lambda *_: [broken])
    code, out, _ = run("doctor", "--json")
    (check,) = json.loads(out, parse_constant=pytest.fail)["parity"]
    assert (code, check["error"], check["ok"]) == (1, None, False)


def test_json_of_perplexity_has_null_for_an_infinite_one(run, tiny, text_file, monkeypatch):
    monkeypatch.setattr(evaluation, "_loss", lambda *_: 1e5)
    code, out, _ = run("perplexity", text_file, *exact(tiny, "-c", 32, "--chunks", 2, "--json"))
    record = json.loads(out, parse_constant=pytest.fail)
    assert (code, record["perplexity"], record["estimates"]) == (0, None, [None, None])
    assert record["negative_log_likelihood"] == 2e5


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("the cat is in and on the end of a thing; and the other is of the cat. " * 4)
    return path


def expected_perplexities(tiny: Path, ids: list[int], context: int, chunks: int) -> list[float]:
    """llama-perplexity's rule, written out one token at a time over transformers' logits."""
    model = reference_model(tiny)
    total, count, estimates = 0.0, 0, []
    for chunk in range(chunks):
        tokens = ids[chunk * context : (chunk + 1) * context]
        tokens[0] = 1
        with torch.no_grad():
            log_probabilities = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        for position in range(context // 2, context - 1):
            total -= float(log_probabilities[position, tokens[position + 1]])
            count += 1
        estimates.append(torch.tensor(total / count).exp().item())
    return estimates


def test_perplexity_follows_llama_perplexity(run, tiny, text_file):
    tokenizer = Tokenizer.from_gguf(open_gguf(tiny).metadata)
    ids = [1, *tokenizer.encode(text_file.read_text(), add_special_tokens=False)]
    expected = expected_perplexities(tiny, ids, 32, 3)
    code, out, _ = run("perplexity", text_file, *exact(tiny, "-c", 32, "--chunks", 3))
    assert code == 0
    running, result = out.splitlines()
    found = [float(number) for number in re.findall(r"\[\d\](\d+\.\d{4})", running)]
    assert found == pytest.approx(expected, rel=1e-4)
    assert result == f"perplexity {found[-1]:.4f} over 45 tokens (3 chunks of 32)"


def test_perplexity_json(run, tiny, text_file):
    record = json.loads(run("perplexity", text_file, *exact(tiny, "-c", 32, "--chunks", 2, "--json"))[1])
    assert schema(record) == {
        "model": "str",
        "file": "str",
        "activations": "str",
        "context": "int",
        "chunks": "int",
        "scored_tokens": "int",
        "negative_log_likelihood": "float",
        "estimates": ["float"],
        "perplexity": "float",
    }
    assert (record["chunks"], record["scored_tokens"], len(record["estimates"])) == (2, 30, 2)


def test_doctor_tells_versions_threads_and_parity(run):
    code, out, _ = run("doctor")
    assert code == 0
    assert f"torch            {torch.__version__}" in out.splitlines()
    assert re.search(r"^threads          \d+ ", out, re.MULTILINE)
    assert (
        len(re.findall(r"^  cpu  linear int8 +Q\w+  96x512(  [ \d]\d: \de-\d\d){4}$", out, re.MULTILINE))
        == 10
    )
    assert out.endswith("all right\n")
