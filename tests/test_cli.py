"""The command line on a tiny model: generate and chat, errors, interrupts, and a lean start."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import call, exact, schema
from hf_reference import reference_model
from tiny_models import write_tiny_llama

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.cli import answer
from realizar_torch.errors import FormatError

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
    return partial(call, capsys)


def test_without_a_count_an_answer_ends_where_the_cache_does(run, tiny, tokenizer):
    """128 new tokens are usual; this prompt leaves fewer."""
    prompt = "the cat and the hat " * 5
    free = 128 - len(tokenizer.encode(prompt))
    assert 0 < free < 100
    code, out, _ = run("generate", prompt, *exact(tiny, "--json"))
    answer = json.loads(out)
    assert code == 0 and answer["stop_reason"] == "length" and len(answer["token_ids"]) == free


ANSWER_SCHEMA = {
    "model": "str",
    "text": "str",
    "token_ids": ["int"],
    "stop_reason": "str",
    "metrics": {
        "prompt_tokens": "int",
        "reused_tokens": "int",
        "new_tokens": "int",
        "time_to_first_token": "float",
        "prompt_tokens_per_second": "float",
        "tokens_per_second": "float",
        "gigabytes_per_second": "float",
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
    # the second prompt begins with the first one and its answer, the third only with the template's words
    prompts, reused = ([r["metrics"][f"{name}_tokens"] for r in records] for name in ("prompt", "reused"))
    assert reused[0] == 0 < reused[2] < prompts[0] <= reused[1] < prompts[1]


def test_chat_prints_answers_behind_the_prompt_sign(run, tiny, greedy, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    code, out, err = run("chat", *exact(tiny, "--temperature", 0, "-n", 5))
    messages = [{"role": "user", "content": "the cat"}]
    answer = tokenizer.decode(greedy(tokenizer.apply_chat_template(messages, add_generation_prompt=True), 5))
    assert (code, out) == (0, f"> {answer}\n> \n")
    assert re.search(r"^\[first token .* tok/s; \d+ prompt \+ 5 new tokens; length\]$", err, re.MULTILINE)


def test_chat_without_a_template_ends_before_the_first_question(run, tmp_path):
    base = write_tiny_llama(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    code, out, err = run("chat", "--model", base)
    assert (code, out) == (2, "") and "base.gguf has no chat template" in err


def test_chat_drops_a_message_that_is_too_long_and_goes_on(run, tiny, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x ' * 200}\nand\n"))
    code, out, err = run("chat", *exact(tiny, "--temperature", 0, "-n", 2, "--json"))
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "/reset" in err


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
        (("perplexity", "no-such-text", "--model", "{tiny}"), "cannot be read: No such file"),
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


def test_first_run_says_that_kernels_are_compiled(run, tiny, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setattr("realizar_torch.cpu_kernels.jit.cache_folder", lambda: folder)
    assert "First run: compiling kernels" in run("generate", PROMPT, "--model", tiny, "-n", 1)[2]
    (folder / "kernel.bin").touch()
    assert "ompiling" not in run("generate", PROMPT, "--model", tiny, "-n", 1)[2]
    monkeypatch.setattr("realizar_torch.cpu_kernels.jit.cache_folder", lambda: None)
    assert "at every run" in run("generate", PROMPT, "--model", tiny, "-n", 1)[2]


def test_threads_beyond_the_cores_are_cut_with_a_warning(run, tiny):
    before = torch.get_num_threads()
    try:
        assert "using" in run("generate", PROMPT, "--model", tiny, "-n", 1, "--threads", 5000)[2]
        assert torch.get_num_threads() < 5000
    finally:
        torch.set_num_threads(before)


def test_a_seed_beyond_64_bits_is_an_argument_error(run, tiny):
    with pytest.raises(SystemExit) as ended:
        run("generate", PROMPT, "--model", tiny, "--seed", 10**30)
    assert ended.value.code == 2


def test_interrupt_ends_with_130(run, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "open_session", interrupted)
    assert run("chat") == (130, "", "\n")


@pytest.mark.parametrize("verb", ["generate", "info"])
def test_interrupt_during_an_import_that_swallows_it_ends_the_process(tiny, tmp_path, verb):
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    options = ["x", "--model", str(tiny)] if verb == "generate" else [str(tiny)]
    done = subprocess.run(
        [sys.executable, "-m", "realizar_torch.cli", verb, *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


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


def test_chat_goes_on_after_an_interrupt(run, tiny, monkeypatch):
    """An interrupt before the first token forgets the question, one after the third does not."""
    from realizar_torch.generation import loop

    originals, calls = {name: getattr(loop, name) for name in ("prefill", "decode_step")}, []

    def interrupted(name, *arguments, **options):
        calls.append(name)
        if calls in (["prefill"], ["prefill"] * 2 + ["decode_step"] * 3):
            raise KeyboardInterrupt
        return originals[name](*arguments, **options)

    for name in originals:
        monkeypatch.setattr(loop, name, partial(interrupted, name))
    monkeypatch.setattr(sys, "stdin", io.StringIO("never\nthe cat\nand\n"))
    code, out, _ = run("chat", *exact(tiny, "--temperature", 0, "-n", 5, "--json"))
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [len(record["token_ids"]) for record in records] == [0, 3, 5]
    assert [record["stop_reason"] for record in records] == ["interrupted", "interrupted", "length"]

    monkeypatch.undo()
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    alone = json.loads(run("chat", *exact(tiny, "--temperature", 0, "-n", 3, "--json"))[1])
    assert alone["token_ids"] == records[1]["token_ids"]
    assert alone["metrics"]["prompt_tokens"] == records[1]["metrics"]["prompt_tokens"]


def test_an_answer_that_fails_halfway_ends_its_line(run, tiny, monkeypatch):
    from realizar_torch.generation import loop

    original, calls = loop.decode_step, []

    def failing(model, tokens, state):
        calls.append(tokens)
        if len(calls) == 10:
            raise FormatError("no more")
        return original(model, tokens, state)

    monkeypatch.setattr(loop, "decode_step", failing)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    code, out, err = run("chat", *exact(tiny, "--temperature", 0, "-n", 20))
    assert code == 0 and re.fullmatch(r"> [^\n]+\n> \n", out)
    assert err == "error: no more; the message was dropped (/reset starts anew)\n"


def test_a_reader_that_leaves_early_is_no_error(tiny):
    command = f"{sys.executable} -m realizar_torch.cli info {tiny} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
