"""Arguments of rt.load that change what a directory says, and every one that cannot be meant."""

import re
import shutil

import numpy as np
import pytest
import torch
from hf_directories import VOCAB, change_tensors, edit, write_hf_directory

import realizar_torch as rt


def test_config_replaces_metadata(directory):
    ids = torch.randint(0, VOCAB, (2, 60))
    other, _ = rt.load(directory, config={"llama.rope.freq_base": 100.0}, activations="float")
    edit(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    changed, _ = rt.load(directory, activations="float")
    with torch.inference_mode():
        assert torch.equal(other(ids).logits, changed(ids).logits)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"llama.rope.freq_bass": 1.0}, r"nothing reads.*llama\.rope\.freq_base"),
        ({"rope.freq_base": 1.0}, "nothing reads"),
        ({"llama.block_count": "two"}, "block_count is str"),
        ([("llama.block_count", 2)], "expected a dict"),
        ({"llama.block_count": 2}, "2 layers|unexpected"),
    ],
)
def test_config_that_cannot_be_meant_is_refused(directory, config, words):
    with pytest.raises(rt.RealizarError, match=words):
        rt.load(directory, config=config)


def test_progress_that_cannot_be_called_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(rt.FormatError, match="progress is 5; expected a function"):
        rt.load(tmp_path / "not there", progress=5)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    with pytest.raises(rt.FormatError, match="progress is 5; expected a function"):
        rt.quantize_model(model, "Q4_K", progress=5)
    assert isinstance(model[0], torch.nn.Linear)


@pytest.mark.parametrize("own", [True, False])
def test_a_padded_vocabulary_generates_to_the_end(tmp_path, own):
    """A head that prefers ids for which tokenizer.json has no token."""
    write_hf_directory(tmp_path, vocab_size=VOCAB + 7, tie_word_embeddings=False)

    def prefer_padding(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["lm_head.weight"]
        head[VOCAB + 3] = 100 * tensors["model.norm.weight"]
        head[VOCAB + 4] = -head[VOCAB + 3]

    change_tensors(tmp_path, prefer_padding)
    model, tokenizer = rt.load(tmp_path, tokenizer=None if own else tmp_path)
    prompt = torch.tensor([tokenizer.encode("the cat")])
    ids = model.generate(prompt, max_new_tokens=4, eos_token_id=[])[0, prompt.shape[1] :]
    assert set(ids.tolist()) <= {VOCAB + 3, VOCAB + 4}
    assert rt.generate(model, tokenizer, "the cat", max_new_tokens=4) == ""
    with pytest.raises(rt.FormatError, match=f"outside the vocabulary of {VOCAB + 7}"):
        tokenizer.decode([VOCAB + 7])


def test_a_tokenizer_of_more_tokens_than_the_model_knows_is_refused(tmp_path):
    write_hf_directory(tmp_path / "small")
    write_hf_directory(tmp_path / "padded", vocab_size=VOCAB + 7)
    _, tokenizer = rt.load(tmp_path / "small")
    assert rt.load(tmp_path / "padded", tokenizer=tokenizer)[1] is tokenizer
    edit(tmp_path / "padded" / "tokenizer.json", added_tokens=_added(VOCAB))
    with pytest.raises(rt.FormatError, match=f"has {VOCAB + 1} tokens, the model's vocabulary {VOCAB}"):
        rt.load(tmp_path / "small", tokenizer=tmp_path / "padded")
    # a model's own may have spare ones
    shutil.copy(tmp_path / "padded" / "tokenizer.json", tmp_path / "small")
    assert rt.load(tmp_path / "small")[1].vocab_size == VOCAB + 1


@pytest.mark.parametrize("ids", [[2], {2}, 2])
def test_a_tokenizer_whose_stop_ids_are_no_tuple_is_refused_before_any_weight_is_read(directory, ids):
    tokenizer = rt.load(directory)[1]
    tokenizer.eos_token_ids = ids
    message = re.escape(f"tokenizer.eos_token_ids is {ids!r}; expected a tuple of ints")
    with pytest.raises(rt.FormatError, match=message):
        rt.load(directory, tokenizer=tokenizer, progress=lambda *_: pytest.fail("a weight was read"))


def _added(identifier):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": identifier, "content": "<beyond>", **flags}]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": -3}, "llama.block_count"),
        ({"general.architecture": 5}, "general.architecture"),
        ({"llama.rope.freq_base": float("nan"), "llama.context_length": 64}, "llama.rope.freq_base"),
        ({"llama.attention.head_count_kv": 5}, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count": 7}, "llama.attention.head_count"),
        ({"llama.rope.dimension_count": 23}, "llama.rope.dimension_count"),
        ({"llama.attn_logit_softcapping": -1.0}, "llama.attn_logit_softcapping"),
        ({"llama.logit_scale": float("inf")}, "llama.logit_scale"),
        ({"llama.rope.scaling.factor": -2.0}, "llama.rope.scaling.factor"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens"),
    ],
)
def test_a_wrong_value_of_config_is_the_caller_s_fault(directory, config, key):
    with pytest.raises(rt.FormatError) as caught:
        rt.load(directory, config=config)
    assert type(caught.value) is rt.FormatError
    assert str(caught.value).startswith(f"config[{key!r}] is {config[key]!r}: ")


def test_a_wrong_tokenizer_entry_of_config_is_the_caller_s_fault(tmp_path):
    from tiny_models import write_tiny_llama

    path = write_tiny_llama(tmp_path / "tiny.gguf")
    for name, value in (("merges", 4), ("token_type", ["x"] * 300), ("add_bos_token", "yes")):
        key = f"tokenizer.ggml.{name}"
        with pytest.raises(rt.FormatError, match=re.escape(f"config[{key!r}]")):
            rt.load(path, config={key: value})


def test_numbers_and_names_of_other_types(directory):
    model, _ = rt.load(directory, dtype="float16", max_seq_len=np.int64(40), batch_size=np.int64(2))
    assert model.dtype == torch.float16 and model.max_seq_len == 40
    assert model.layers[0].mlp.up_proj.weight.dtype == torch.float16


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"device": "meta"}, "no values"),
        ({"device": object()}, "expected 'cpu'"),
        ({"dtype": "int8"}, "float16"),
        ({"dtype": torch.int8}, "float16"),
        ({"max_seq_len": 129}, "1 to 128"),
        ({"max_seq_len": True}, "1 to 128"),
        ({"batch_size": 0}, "1 to 32"),
        ({"batch_size": 33}, "1 to 32"),
        ({"tokenizer": 7}, "expected a path or a Tokenizer"),
    ],
)
def test_bad_arguments_are_refused(directory, argument, words):
    with pytest.raises(rt.FormatError, match=words):
        rt.load(directory, **argument)


def test_a_device_without_a_back_end_is_refused_in_a_sentence(directory):
    with pytest.raises(rt.BackendUnavailableError) as refused:
        rt.load(directory, device="fpga")
    message = str(refused.value)
    assert message.startswith("device 'fpga' cannot be used: ") and "'FPGA'" in message
    assert message.endswith("; expected 'cpu', or 'cuda' where PyTorch sees a GPU")
    # torch's own message goes on for a page
    assert ". " not in message
