"""The command line on a tiny model: what each verb prints, its JSON, its exit codes, and its lean start."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from hf_reference import reference_model
from tiny_models import tiny_metadata, tiny_tensors, write_tiny_llama

from realizar_torch import cli, cli_session
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.tokenizer import Tokenizer

PROMPT = "the cat is in the"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def greedy(tiny: Path):
    """Greedy ids of transformers in fp32 for a prompt: the independent answer."""
    model = reference_model(tiny)

    def continue_(ids: list[int], count: int, **options) -> list[int]:
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=0,
            **options,
        )
        return out[0, len(ids) :].tolist()

    return continue_


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(tiny).metadata)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run_(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def exact(tiny: Path, *options: object) -> tuple[object, ...]:
    """Options that make the answer equal to the reference's."""
    return ("--model", tiny, "--activations", "float", *options)


def schema(value: object) -> object:
    """The types of a JSON value; a list is as its first element."""
    if isinstance(value, dict):
        return {key: schema(item) for key, item in value.items()}
    if isinstance(value, list):
        return [schema(item) for item in value[:1]]
    return type(value).__name__


ANSWER_SCHEMA = {
    "model": "str",
    "text": "str",
    "token_ids": ["int"],
    "stop_reason": "str",
    "metrics": {
        "prompt_tokens": "int",
        "new_tokens": "int",
        "time_to_first_token": "float",
        "prompt_tokens_per_second": "float",
        "tokens_per_second": "float",
    },
    "import_seconds": "float",
    "load_seconds": "float",
}


def test_generate_prints_the_answer_then_one_line_of_numbers(run, tiny, greedy, tokenizer):
    code, out, err = run("generate", PROMPT, *exact(tiny, "-n", 20))
    expected = tokenizer.decode(greedy(tokenizer.encode(PROMPT), 20))
    assert (code, out) == (0, expected + "\n")
    count = len(tokenizer.encode(PROMPT))
    numbers = rf"first token \d+\.\d\d s, \d+\.\d tok/s; {count} prompt \+ 20 new tokens; length"
    assert re.search(rf"^\[import \d+\.\d\d s, load \d+\.\d\d s, {numbers}\]\n\Z", err, re.MULTILINE)


def test_generate_json(run, tiny, greedy, tokenizer):
    options = ("--repetition-penalty", 1.3, "-n", 15, "--json")
    code, out, _ = run("generate", PROMPT, *exact(tiny, *options))
    record = json.loads(out)
    assert code == 0
    assert schema(record) == ANSWER_SCHEMA
    ids = greedy(tokenizer.encode(PROMPT), 15, repetition_penalty=1.3)
    assert len(set(ids)) > 8
    assert record["token_ids"] == ids
    assert record["text"] == tokenizer.decode(ids)
    assert record["metrics"]["new_tokens"] == 15


def test_generate_reads_standard_input_and_uses_the_chat_template(run, tiny, greedy, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    _, out, _ = run("generate", "--system", "in and or", *exact(tiny, "-n", 6, "--json"))
    text = "<|im_start|>system\nin and or<|im_end|>\n<|im_start|>user\nthe cat<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    assert json.loads(out)["token_ids"] == greedy(tokenizer.encode(text, parse_special=True), 6)


def test_generate_stops_before_the_stop_text(run, tiny, greedy, tokenizer):
    text = tokenizer.decode(greedy(tokenizer.encode(PROMPT), 20, repetition_penalty=1.3))
    stop = text[3:5]
    options = ("--repetition-penalty", 1.3, "-n", 20, "--stop", stop, "--stop", "never there")
    _, out, err = run("generate", PROMPT, *exact(tiny, *options))
    assert out == text[: text.index(stop)] + "\n"
    assert "stop_string" in err


def test_generate_sampling_is_repeatable_by_seed(run, tiny):
    def answer(seed: int) -> str:
        options = ("--temperature", 1.5, "--top-k", 50, "--seed", seed, "-n", 12)
        return run("generate", PROMPT, *exact(tiny, *options))[1]

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_chat_keeps_the_conversation_until_reset(run, tiny, greedy, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nand\n/reset\nand\n/exit\nnever read\n"))
    code, out, _ = run("chat", *exact(tiny, "--temperature", 0, "-n", 5, "--json"))
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [schema(record) for record in records] == [ANSWER_SCHEMA] * 3

    def ask(*messages: str) -> list[int]:
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": content} for i, content in enumerate(messages)]
        return greedy(tokenizer.apply_chat_template(chat, add_generation_prompt=True), 5)

    assert records[0]["token_ids"] == ask("the cat")
    assert records[1]["token_ids"] == ask("the cat", records[0]["text"], "and")
    assert records[2]["token_ids"] == ask("and")
    assert records[1]["token_ids"] != records[2]["token_ids"]


def test_chat_prints_answers_behind_the_prompt_sign(run, tiny, greedy, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    code, out, err = run("chat", *exact(tiny, "--temperature", 0, "-n", 5))
    messages = [{"role": "user", "content": "the cat"}]
    answer = tokenizer.decode(greedy(tokenizer.apply_chat_template(messages, add_generation_prompt=True), 5))
    assert (code, out) == (0, f"> {answer}\n> \n")
    assert re.search(r"^\[first token .* tok/s; \d+ prompt \+ 5 new tokens; length\]$", err, re.MULTILINE)


def test_chat_drops_a_message_that_is_too_long_and_goes_on(run, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x ' * 200}\nand\n"))
    code, out, err = run("chat", *exact(tiny, "--temperature", 0, "-n", 2, "--json"))
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "/reset" in err


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
    assert json.loads(run("check", tiny, "--json")[1]) == {"file": str(tiny), "loads": True, "problems": []}


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
    assert cells == ["model", "size", "params", "backend", "activations", "threads", "test", "t/s"]
    assert set(rule) == set("|-: ")
    common = r"\| +llama BF16 \| 0\.99 MiB \| 1\.26 M \| +cpu \| +int8 \| +\d+ \| "
    assert re.fullmatch(common + r"pp16 \| +\d+\.\d\d ± \d+\.\d\d \|", prompt)
    assert re.fullmatch(common + r" tg8 \| +\d+\.\d\d ± \d+\.\d\d \|", generation)


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
    assert [(r["test"], r["n_prompt"], r["n_gen"]) for r in records] == [("pp16", 16, 0), ("tg8", 0, 8)]
    for record in records:
        tokens = record["n_prompt"] + record["n_gen"]
        assert len(record["samples_ns"]) == 3
        for nanoseconds, rate in zip(record["samples_ns"], record["samples_ts"], strict=True):
            assert rate * nanoseconds / 1e9 == pytest.approx(tokens, rel=1e-3)


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


def test_perplexity_follows_llama_perplexity(run, tiny, tokenizer, text_file):
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
    assert len(re.findall(r"^  cpu +Q\w+ +float \d\.\de-\d\d +int8 \d\.\de-\d\d$", out, re.MULTILINE)) == 10
    assert out.endswith("all right\n")


def test_doctor_json_and_exit_code_of_a_wrong_kernel(run, monkeypatch):
    from realizar_torch import diagnosis

    right = diagnosis.ops.linear

    def wrong(x, weight, fmt, *args, **options):
        result = right(x, weight, fmt, *args, **options)
        return result * 1.001 if fmt == "Q5_K" and len(x) > 1 else result

    monkeypatch.setattr(diagnosis.ops, "linear", wrong)
    code, out, _ = run("doctor", "--json")
    record = json.loads(out)
    assert code == 1
    assert record["ok"] is False
    assert {check["fmt"] for check in record["parity"] if not check["ok"]} == {"Q5_K"}
    assert schema(record["parity"]) == [
        {"device": "str", "fmt": "str", "activations": "str", "error": "float", "ok": "bool"}
    ]
    assert all(isinstance(value, str) for value in record["facts"].values())
    assert "WRONG" in run("doctor")[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", "x", "--model", "no/such/file.gguf"), "no/such/file.gguf"),
        (("generate", "x", "--model", "{tiny}", "-n", "1000"), "1000 new tokens"),
        (("generate", "x", "--model", "{tiny}", "--temperature", "-1"), "temperature"),
        (("generate", "x", "--model", "{tiny}", "--top-k", "5"), "--temperature"),
        (("generate", "", "--model", "{tiny}"), "no tokens"),
        (("bench", "--model", "{tiny}", "-p", "500"), "--max-seq-len"),
        (("perplexity", "no-such-text", "--model", "{tiny}"), "no-such-text"),
        (("perplexity", "{tiny}", "--model", "{tiny}"), "UTF-8"),
        (("info", "no-such.gguf"), "no-such.gguf"),
    ],
)
def test_errors_are_one_line_on_standard_error(run, tiny, argv, message):
    code, out, err = run(*(argument.format(tiny=tiny) for argument in argv))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("realizar-torch: error: ") and message in err


def test_help_and_mistakes_do_not_import_torch():
    script = """
import sys
from realizar_torch import cli
for line in ("--help", "--version", "generate --help", "generate --no-such-option", "bench -p -1"):
    try:
        cli.main(line.split())
    except SystemExit as exit:
        print(line, exit.code, file=sys.stderr)
assert not {"torch", "numba", "numpy"} & set(sys.modules), "heavy import"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" 2\n") == 2 and done.stderr.count(" 0\n") == 3


def test_first_run_says_that_kernels_are_compiled(run, tiny, monkeypatch):
    monkeypatch.setattr(cli_session, "_kernels_are_compiled", lambda: False)
    assert "compiling kernels" in run("generate", PROMPT, "--model", tiny, "-n", 1)[2]
    monkeypatch.setattr(cli_session, "_kernels_are_compiled", lambda: True)
    assert "compiling" not in run("generate", PROMPT, "--model", tiny, "-n", 1)[2]


def test_interrupt_ends_with_130_and_no_traceback(tiny):
    command = [sys.executable, "-m", "realizar_torch.cli", "chat", "--model", str(tiny), "--temperature", "0"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # long before the import of torch is done
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_interrupted_answer_keeps_what_was_said(run, tiny, monkeypatch):
    from realizar_torch.generation import loop

    original, calls = loop.decode_step, []

    def interrupted(model, tokens, state):
        calls.append(tokens)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(model, tokens, state)

    monkeypatch.setattr(loop, "decode_step", interrupted)
    code, out, _ = run("generate", PROMPT, *exact(tiny, "-n", 20, "--json"))
    record = json.loads(out)
    assert (code, record["stop_reason"], record["metrics"]["new_tokens"]) == (130, "interrupted", 3)


def test_a_reader_that_leaves_early_is_no_error(tiny):
    command = f"{sys.executable} -m realizar_torch.cli info {tiny} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
