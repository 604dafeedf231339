"""What callers give as the path of a model: the user's home, URLs, and what is no path."""

from pathlib import Path

import pytest
from gguf_files import write_gguf
from tiny_models import tiny_metadata, tiny_tensors, write_tiny_llama

import realizar_torch as rt

OPENERS = [rt.open_gguf, rt.load]


@pytest.mark.parametrize("open_", OPENERS)
@pytest.mark.parametrize("wrong", [None, 3, "", b"model.gguf", ["model.gguf"]])
def test_what_is_no_path_is_refused(open_, wrong, tmp_path, monkeypatch):
    # an empty path would be the current folder
    write_tiny_llama(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rt.FormatError, match=r"the path is .* expected a str or a Path"):
        open_(wrong)


@pytest.mark.parametrize("open_", OPENERS)
def test_urls_are_said_not_to_be_fetched(open_):
    with pytest.raises(rt.FormatError, match=r"is a URL, which is not fetched.*OWNER/NAME:QUANT"):
        open_("https://example.org/owner/name/resolve/main/model.gguf")


@pytest.mark.parametrize("open_", OPENERS)
def test_a_path_that_the_system_refuses_is_cut_short(open_):
    with pytest.raises(rt.GGUFError, match="too long") as refused:
        open_("x" * 5000)
    assert len(str(refused.value)) < 500


def test_the_home_of_the_user_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    model = write_tiny_llama(tmp_path / "model.gguf")
    assert rt.open_gguf("~/model.gguf").path == rt.open_gguf(Path("~/model.gguf")).path == model
    assert rt.load("~/model.gguf", tokenizer="~/model.gguf")[0].origin is not None
    with pytest.raises(rt.GGUFError, match="~no_such_user"):
        rt.open_gguf("~no_such_user/model.gguf")


def test_as_many_models_are_named_as_a_directory_holds(tmp_path):
    metadata, tensors = tiny_metadata(), tiny_tensors()
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        write_gguf(tmp_path / name, metadata, tensors)
    with pytest.raises(rt.GGUFError, match=r"found 2 models: 'a.gguf', 'b-00001-of-00002.gguf', expected"):
        rt.open_gguf(tmp_path)
