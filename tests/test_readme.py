"""The README tells what the code does: its tables are the code's, its example runs."""

import re
import runpy
import subprocess
import sys

import pytest
import torch
from readme_tables import README, updated
from tiny_models import write_tiny_llama


def test_tables_are_the_codes_own():
    text = README.read_text()
    assert updated(text) == text, "run python tests/readme_tables.py"


@pytest.mark.filterwarnings("ignore:decoding runs module by module")
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_llama(tmp_path / "model.gguf")
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(example.replace("max_new_tokens=64", "max_new_tokens=8"), names)
    assert names["ids"].shape[1] > names["input_ids"].shape[1]
    assert names["linear"].in_features == 256
    assert capsys.readouterr().out


def test_the_commands_of_its_figures_are_there():
    commands = re.findall(r"`python (bench/\w+\.py)([^`]*)`", README.read_text())
    assert len(commands) > 10
    for script, arguments in commands:
        source = (README.parent / script).read_text()
        for option in re.findall(r"--[\w-]+", arguments):
            assert f'"{option}"' in source, f"{script} has no {option}"


def test_the_help_of_benchmarks_shows_their_commands_as_lines():
    for script in (README.parent / "bench").glob("*.py"):
        source = script.read_text()
        assert source.count("description=__doc__") == source.count("HelpFormatter"), script.name


def test_a_benchmark_of_a_missing_file_ends_in_a_sentence(tmp_path):
    missing = tmp_path / "none.gguf"
    command = [sys.executable, README.parent / "bench" / "load.py", "--model", missing]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and f"GGUFError: {missing}: path: found" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run there")
def test_benchmarks_of_gpus_end_in_a_sentence_without_one(monkeypatch):
    bench = README.parent / "bench"
    monkeypatch.syspath_prepend(bench)
    for script in sorted(bench.glob("gpu_*.py")):
        monkeypatch.setattr(sys, "argv", [str(script)])
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
            runpy.run_path(str(script), run_name="__main__")
