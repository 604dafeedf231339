"""rt.save of a model that was loaded with another tokenizer than its own: that one is saved, or a warning."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Typed, write_gguf
from hf_directories import edit, write_hf_directory
from tiny_models import tokenizer_metadata, write_tiny_llama

import realizar_torch as rt
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.models.saved_format import TOKENIZER_FILE

TEXT = "the cat<|im_end|>  and the hat of the "
MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Models whose own tokenizer makes something else of TEXT than the other one beside them."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "model.gguf")
    write_hf_directory(folder / "directory")
    tokens = tokenizer_metadata()["tokenizer.ggml.tokens"]
    other = tokenizer_metadata() | {
        # a tokenizer of this name swallows spaces behind special tokens
        "general.name": "Phi-3 words",
        "general.architecture": "llama",
        # fewer than the model has rows
        "tokenizer.ggml.tokens": tokens[:3] + tokens[:3:-1],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}!",
        "tokenizer.ggml.token_type": Typed("i32", [3] * 3 + [1] * (len(tokens) - 4)),
    }
    write_gguf(folder / "other.gguf", other, {})
    write_hf_directory(folder / "other")
    edit(folder / "other" / "tokenizer_config.json", eos_token=tokens[1], pad_token=tokens[2])
    (folder / "other" / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0]['content'] }}")
    words = json.loads((folder / "other" / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["c"], vocabulary["n"] = vocabulary["n"], vocabulary["c"]
    (folder / "other" / "tokenizer.json").write_text(json.dumps(words))
    return folder


def behaviour(tokenizer: Any) -> list[Any]:
    return [
        type(tokenizer),
        tokenizer.encode(TEXT),
        tokenizer.encode(TEXT, parse_special=True),
        tokenizer.apply_chat_template(MESSAGES),
        tokenizer.eos_token_ids,
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        tokenizer.vocab_size,
    ]


FORMS: dict[str, Callable[[Path], Any]] = {
    "path": lambda path: path,
    "object": lambda path: rt.load(path.with_name("model.gguf"), tokenizer=path)[1],
    "pickle": lambda path: pickle.loads(pickle.dumps(FORMS["object"](path))),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("other", ["other.gguf", "other"])
@pytest.mark.parametrize("own", ["model.gguf", "directory"])
def test_the_tokenizer_that_was_given_is_saved(models, tmp_path, own, other, form):
    model, given = rt.load(models / own, tokenizer=form(models / other))
    _, replaced = rt.load(models / own)
    assert all(a != b for a, b in zip(behaviour(given)[1:4], behaviour(replaced)[1:4], strict=True))
    rt.save(model, tmp_path / "saved")
    again, found = rt.load(tmp_path / "saved")
    assert behaviour(found) == behaviour(given)
    assert (again.eos_token_ids, again.pad_token_id) == (model.eos_token_ids, model.pad_token_id)
    names = [one.origin.metadata.get("general.name") for one in (again, rt.load(models / own)[0])]
    assert names[0] == names[1]
    rt.save(again, tmp_path / "twice")
    assert behaviour(rt.load(tmp_path / "twice")[1]) == behaviour(given)


@pytest.mark.parametrize("template", ["{{ messages[0]['role'] }}", None])
@pytest.mark.parametrize("other", ["other.gguf", "other"])
def test_with_the_chat_template_that_was_set_on_it(models, tmp_path, other, template):
    _, given = rt.load(models / "model.gguf", tokenizer=models / other)
    given.chat_template = template
    rt.save(rt.load(models / "model.gguf", tokenizer=given)[0], tmp_path / "saved")
    assert rt.load(tmp_path / "saved")[1].chat_template == template


def test_what_is_saved_with_the_model_s_own_is_what_it_was(models, tmp_path):
    for name, options in (("own", {}), ("given", {"tokenizer": models / "model.gguf"})):
        rt.save(rt.load(models / "model.gguf", **options)[0], tmp_path / name)
    own, given = (json.loads((tmp_path / name / TOKENIZER_FILE).read_text()) for name in ("own", "given"))
    assert given == own | {"tokenizer.made_for": "tiny random llama"}


class Stranger:
    """What rt.load takes for a tokenizer, and knows nothing of."""

    vocab_size, eos_token_ids, pad_token_id = 3, (), None

    def encode(self, text: str, **options: bool) -> list[int]:
        return [0] * len(text)

    def decode(self, ids: list[int], **options: bool) -> str:
        return "x" * len(ids)

    def detokenizer(self, **options: bool) -> Any:
        raise NotImplementedError


class Shouting(Tokenizer):
    def encode(self, text: str, **options: bool) -> list[int]:
        return super().encode(text.upper(), **options)


def test_a_tokenizer_of_another_class_is_not_saved_with_a_warning(models, tmp_path):
    shouting = Shouting.from_gguf(rt.open_gguf(models / "model.gguf").metadata)
    for given in (Stranger(), shouting):
        kind = type(given).__name__
        model, _ = rt.load(models / "model.gguf", tokenizer=given)
        with pytest.warns(UserWarning, match=rf"class {kind}, which rt\.save cannot.*tokenizer=") as warned:
            rt.save(model, tmp_path / kind)
        assert warned[0].filename == __file__
        with pytest.raises(rt.CheckpointError, match=r"has no tokenizer.*tokenizer="):
            rt.load(tmp_path / kind)
        again, found = rt.load(tmp_path / kind, tokenizer=given)
        assert found is given
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(again(ids).logits, model(ids).logits)
