"""rt.save: what rt.load reads back is the same to the byte; a directory appears whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from hf_directories import INDEX, write_hf_directory
from random_models import write_random_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_llama

import realizar_torch as rt
from realizar_torch.models.saved_format import CONFIG_FILE, TOKENIZER_FILE

PROMPT = "the cat and the hat of the "
SHARD = 300_000


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    """A tensor in every packed format, plain ones too."""
    return write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def pristine(model_file, tmp_path_factory) -> Path:
    """Saved in several shards; nobody changes it."""
    directory = tmp_path_factory.mktemp("saved") / "tiny"
    rt.save(rt.load(model_file)[0], directory, max_shard_size=SHARD)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(first: torch.nn.Module, second: torch.nn.Module) -> None:
    left, right = first.state_dict(), second.state_dict()
    assert list(left) == list(right) and left._metadata == right._metadata
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


# -- the round trip ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_a_saved_model_is_the_same_model(model_file, pristine, activations):
    model, tokenizer = rt.load(model_file, activations=activations)
    again, other = rt.load(pristine, activations=activations)
    assert_same(model, again)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    assert other.encode(PROMPT) == tokenizer.encode(PROMPT)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, again(ids).logits)
    text = rt.generate(model, tokenizer, PROMPT, max_new_tokens=24)
    assert text and rt.generate(again, other, PROMPT, max_new_tokens=24) == text
    messages = [{"role": "user", "content": "the cat"}]
    assert other.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert (again.eos_token_ids, again.pad_token_id) == (model.eos_token_ids, model.pad_token_id)
    assert again.max_seq_len == model.max_seq_len


def test_saving_what_was_loaded_gives_the_same_bytes(pristine, tmp_path):
    rt.save(rt.load(pristine)[0], tmp_path / "again", max_shard_size=SHARD)
    assert contents(tmp_path / "again") == contents(pristine)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("variant", [{"fmt": "Q8_0"}, {"fmt": "BF16", "tied": False}, {"divisors": True}])
def test_architectures_biases_and_rotary_divisors_survive(tmp_path, arch, variant):
    path = write_random_model(tmp_path / "model.gguf", arch, biases=True, **variant)
    model, _ = rt.load(path, activations="float")
    rt.save(model, tmp_path / "saved")
    again, _ = rt.load(tmp_path / "saved", activations="float")
    ids = torch.randint(0, 250, (2, 50))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_prepacked_model_saves_the_file_s_bytes(model_file, pristine, tmp_path):
    model, _ = rt.load(model_file)
    rt.prepack(model, "planar")
    assert model.lm_head.layout == "planar"
    rt.save(model, tmp_path / "packed", max_shard_size=SHARD)
    assert contents(tmp_path / "packed") == contents(pristine)
    assert model.lm_head.layout == "planar"


def test_the_state_dict_is_in_the_files_under_its_own_names(model_file, pristine):
    model, _ = rt.load(model_file)
    stored: dict[str, torch.Tensor] = {}
    for path in pristine.glob("*.safetensors"):
        stored |= load_file(path)
    assert stored.keys() == model.state_dict().keys()
    before = state(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.warns(UserWarning, match="have as many bytes"):
        model.load_state_dict(stored)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_shards_hold_at_most_what_was_asked(pristine, model_file, tmp_path):
    sizes = {
        path.name: sum(t.nbytes for t in load_file(path).values()) for path in pristine.glob("*.safetensors")
    }
    assert len(sizes) > 3
    # one tensor alone may be larger
    assert all(size <= SHARD or len(load_file(pristine / name)) == 1 for name, size in sizes.items())
    index = json.loads((pristine / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    rt.save(rt.load(model_file)[0], tmp_path / "whole")
    assert sorted(contents(tmp_path / "whole")) == ["model.safetensors", CONFIG_FILE, TOKENIZER_FILE]


def test_tied_weights_are_written_once(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", "llama", fmt="Q8_0")
    for layout in ("ggml", "planar"):
        model, _ = rt.load(path)
        rt.prepack(model, layout)
        rt.save(model, tmp_path / layout)
        stored = load_file(tmp_path / layout / "model.safetensors")
        assert "embed_tokens.weight" in stored and "lm_head.weight" not in stored
        again, _ = rt.load(tmp_path / layout)
        assert again.lm_head.weight is again.embed_tokens.weight
    assert contents(tmp_path / "ggml") == contents(tmp_path / "planar")


def test_a_directory_of_transformers_is_saved_with_its_tokenizer(tmp_path):
    write_hf_directory(tmp_path / "hf", "gemma3_text")
    model, tokenizer = rt.load(tmp_path / "hf", quantize="Q8_0", config={"gemma3.context_length": 64})
    rt.save(model, tmp_path / "saved")
    again, other = rt.load(tmp_path / "saved")
    assert_same(model, again)
    assert again.max_seq_len == 64 and again.embed_tokens.fmt == "Q8_0"
    assert type(other) is type(tokenizer) and other.encode(PROMPT) == tokenizer.encode(PROMPT)
    assert other.eos_token_ids == tokenizer.eos_token_ids
    assert other.chat_template == tokenizer.chat_template


def test_a_saved_model_is_encoded_and_overridden_like_any_other(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", "llama")
    rt.save(rt.load(path)[0], tmp_path / "saved")
    model, _ = rt.load(tmp_path / "saved", quantize="Q4_0", config={"llama.rope.freq_base": 100.0})
    direct, _ = rt.load(path, quantize="Q4_0", config={"llama.rope.freq_base": 100.0})
    assert_same(model, direct)
    assert model.rope.theta == direct.rope.theta == 100.0


def test_copies_and_pickles_can_be_saved(model_file, pristine, tmp_path):
    import copy
    import pickle

    model, _ = rt.load(model_file)
    for name, other in (("copy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        rt.save(other, tmp_path / name, max_shard_size=SHARD)
        assert contents(tmp_path / name) == contents(pristine)


# -- writing -----------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(model_file, tmp_path):
    model, _ = rt.load(model_file)
    target = tmp_path / "here"
    target.mkdir()
    rt.save(model, target)
    before = contents(target)
    with pytest.raises(rt.FormatError, match="not an empty directory"):
        rt.save(model, target)
    with pytest.raises(rt.FormatError, match="not an empty directory"):
        rt.save(model, model_file)
    assert contents(target) == before
    rt.save(model, tmp_path / "new" / "parents" / "too")


def test_an_empty_directory_is_filled_wherever_the_path_leads(model_file, pristine, tmp_path, monkeypatch):
    model, _ = rt.load(model_file)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    rt.save(model, tmp_path / "link", max_shard_size=SHARD)
    (tmp_path / "dangling").symlink_to("made")
    rt.save(model, tmp_path / "dangling", max_shard_size=SHARD)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    rt.save(model, ".", max_shard_size=SHARD)
    # the current directory is the one it was
    assert contents(Path()) == contents(pristine)
    for name in ("real", "made", "here"):
        assert contents(tmp_path / name) == contents(pristine)
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(rt.FormatError, match="not an empty directory"):
        rt.save(model, tmp_path / "link")
    with pytest.raises(rt.FormatError, match="directory is None; expected a path"):
        rt.save(model, None)


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_an_interrupted_write_leaves_nothing(model_file, tmp_path, monkeypatch, kind):
    """safetensors raises its own error for a full disk."""
    import safetensors.torch

    model, _ = rt.load(model_file)
    calls = []

    def full_disk(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise kind("No space left on device")
        return save_file(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(rt.CheckpointError, match="No space left"):
        rt.save(model, tmp_path / "out" / "model", max_shard_size=SHARD)
    assert len(calls) == 2 and list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_saved_is_refused(model_file, tmp_path):
    with pytest.raises(rt.FormatError, match=r"rt\.load made, not this Linear.*torch\.save\("):
        rt.save(torch.nn.Linear(3, 3), tmp_path / "x")
    model, _ = rt.load(model_file)
    for size in (0, 1.5, True, "5GB"):
        with pytest.raises(rt.FormatError, match="max_shard_size"):
            rt.save(model, tmp_path / "x", max_shard_size=size)
    model.layers[1].mlp.adapter = torch.nn.Linear(3, 3)
    with pytest.raises(rt.FormatError, match=r"not know layers\.1\.mlp\.adapter\.weight.*torch\.save\("):
        rt.save(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.gpu
def test_saved_from_a_gpu_and_loaded_there_with_room_for_a_batch(model_file, tmp_path):
    model, tokenizer = rt.load(model_file, device="cuda", dtype="float32")
    rt.save(model, tmp_path / "saved", max_shard_size=SHARD)
    rt.save(rt.load(model_file, device="cpu", dtype="float32")[0], tmp_path / "cpu", max_shard_size=SHARD)
    assert contents(tmp_path / "saved") == contents(tmp_path / "cpu")
    again, _ = rt.load(tmp_path / "saved", device="cuda", dtype="float32", batch_size=4)
    (state,) = again.gpu_states._idle
    before = state.cache._keys.data_ptr(), state.workspace.stats
    ids = torch.tensor([tokenizer.encode(PROMPT)] * 4)
    expected = model.generate(ids, max_new_tokens=8, eos_token_id=[])
    assert torch.equal(again.generate(ids, max_new_tokens=8, eos_token_id=[]), expected)
    assert (state.cache._keys.data_ptr(), state.workspace.stats) == before
