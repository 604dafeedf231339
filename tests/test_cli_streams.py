"""The command line in shells whose streams are closed, full, left by their reader, or lack characters; and
conversations that go on after a message that fails."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import plain, write_gguf
from tiny_models import CHAT_TEMPLATE, TINY, tiny_metadata, tiny_tensors, write_tiny_llama

ERROR = "realizar-torch: error: "
# random weights answer with bytes that are no UTF-8: characters that ASCII cannot show
GENERATE = "generate 'the cat' --temperature 1.5 --seed 3 -n 12 -m {tiny}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    refusing = "{% if 'refuse' in messages[-1]['content'] %}{{ raise_exception('not this') }}{% endif %}"
    metadata = {"tokenizer.chat_template": refusing + CHAT_TEMPLATE}
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", metadata=metadata)


@pytest.fixture(scope="module")
def shell(tiny: Path):
    """Runs a verb and what follows it in a line of bash."""

    def run(line: str, *, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
        command = f"{sys.executable} -m realizar_torch.cli {line.format(tiny=tiny)}"
        # what pytest itself was started with says nothing here
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONIOENCODING"}
        done = subprocess.run(
            ["bash", "-c", command], input=stdin, capture_output=True, env=inherited | environment
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("info {tiny} >/dev/full", "standard output cannot be written: No space left on device"),
        ("check {tiny} --json >/dev/full", "standard output cannot be written: No space left on device"),
        ("--help >/dev/full", "standard output cannot be written: No space left on device"),
        ("info {tiny} 1</dev/null", "standard output cannot be written: Bad file descriptor"),
        ("info {tiny} >&-", "standard output is closed"),
        ("chat -m no-such-model <&-", "standard input is closed"),
        ("generate -m {tiny} <&-", "no prompt"),
        ("generate -m {tiny} 0>/dev/null", "standard input cannot be read: Bad file descriptor"),
        ("chat -m {tiny} --json 0>/dev/null", "standard input cannot be read: Bad file descriptor"),
    ],
)
def test_a_stream_that_is_of_no_use_ends_in_one_line(shell, line, message):
    code, out, err = shell(line)
    assert (code, out) == (2, "")
    assert err.startswith(ERROR + message) and err.count("\n") == 1


def test_an_answer_that_meets_a_full_device_ends_in_one_line(shell):
    code, _, err = shell(GENERATE + " >/dev/full")
    lines = [line for line in err.splitlines() if "ompiling" not in line]
    assert code == 2
    assert lines == [f"{ERROR}standard output cannot be written: No space left on device"]


@pytest.mark.parametrize("line", ["info {tiny}", "info {tiny} --json", GENERATE, "info {tiny} 2>&1"])
def test_a_reader_that_went_away_ends_the_run_in_silence(shell, line):
    # the reader is gone before the first line: bash waits for the program, not for true
    code, out, err = shell(f"{line} | true; exit ${{{{PIPESTATUS[0]}}}}")
    assert (code, out) == (141, "")
    assert "Traceback" not in err and "BrokenPipe" not in err and "Exception" not in err


def test_errors_that_nobody_can_read_keep_their_exit_code(shell):
    assert shell("info no-such-model 2>/dev/full") == (2, "", "")
    assert shell("info no-such-model 2>&-") == (2, "", "")


def test_numbers_for_a_closed_standard_error_are_not_printed_on_standard_output(shell):
    code, out, _ = shell(GENERATE)
    assert code == 0 and shell(GENERATE + " 2>&-") == (0, out, "")


def test_characters_that_output_cannot_show_are_escaped(shell):
    code, whole, _ = shell(GENERATE, PYTHONIOENCODING="utf-8")
    assert code == 0 and "\ufffd" in whole
    expected = whole.encode("ascii", "backslashreplace").decode()
    for environment in (
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ):
        assert shell(GENERATE, **environment)[:2] == (0, expected)
    # what a user has asked for stays
    chosen = whole.encode("ascii", "replace").decode()
    assert shell(GENERATE, PYTHONIOENCODING="ascii:replace")[:2] == (0, chosen)


def test_json_holds_every_character_whatever_output_can_show(shell):
    answers = [shell(GENERATE + " --json", PYTHONIOENCODING=name) for name in ("utf-8", "ascii", "latin-1")]
    texts = [json.loads(out)["text"] for code, out, _ in answers if code == 0]
    assert len(texts) == 3 and "\ufffd" in texts[0] and len(set(texts)) == 1


def test_a_file_name_that_is_no_text_is_shown(shell, tiny):
    name = os.fsdecode(b"caf\xe9.gguf")
    tiny.with_name(name).symlink_to(tiny)
    folder = tiny.parent
    code, out, err = shell(f"check {folder} --json")
    assert (code, err) == (0, "")
    assert {json.loads(line)["file"] for line in out.splitlines()} == {str(tiny), str(folder / name)}
    assert r"caf\udce9.gguf would load" in shell(f"check {folder}")[1]


def test_a_prompt_that_is_no_text_is_refused(shell):
    code, out, err = shell("generate -m {tiny}", stdin=b"caf\xe9\n")
    assert (code, out) == (2, "")
    assert err.startswith(f"{ERROR}the text holds the lone surrogate U+DCE9") and err.count("\n") == 1


CHAT = "chat -m {tiny} --activations float --temperature 0 -n 4 --json"


def _answers(out: str) -> list[list[int]]:
    return [json.loads(line)["token_ids"] for line in out.splitlines()]


@pytest.fixture(scope="module")
def expected(shell) -> list[list[int]]:
    """The answers where no message fails."""
    answers = _answers(shell(CHAT, stdin=b"the cat\nand\n")[1])
    assert len(answers) == 2
    return answers


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"refuse", "the chat template failed: TemplateError: not this"),
        (b"x " * 200, "new tokens need"),
        (b"caf\xe9", "lone surrogate"),
    ],
)
def test_chat_goes_on_after_a_message_that_fails(shell, expected, message, reason):
    """The next answer is the one that is given where the message was never sent."""
    code, out, err = shell(CHAT, stdin=b"the cat\n" + message + b"\nand\n")
    complaints = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 0
    assert len(complaints) == 1 and reason in complaints[0] and "the message was dropped" in complaints[0]
    assert _answers(out) == expected


def test_chat_goes_on_after_an_answer_that_fails(shell, tmp_path):
    tensors = tiny_tensors()
    tensors["output_norm.weight"] = plain(torch.full((TINY.hidden,), math.nan))
    broken = write_gguf(tmp_path / "broken.gguf", tiny_metadata(), tensors)
    code, out, err = shell(f"chat -m {broken}", stdin=b"the cat\nand\n")
    assert code == 0 and out.split() == [">", ">", ">"]
    assert err.count("error: ") == err.count("NaN") == err.count("the message was dropped") == 2


@pytest.mark.parametrize(
    ("options", "message"), [("--temperature -1", "temperature is"), ("-n 1000", "1000 new tokens")]
)
def test_options_that_no_message_could_be_answered_with_end_chat_at_once(shell, options, message):
    code, out, err = shell(f"chat -m {{tiny}} {options}", stdin=b"the cat\n")
    assert (code, out) == (2, "")
    assert err.startswith(ERROR) and message in err and err.count("\n") == 1
