"""tokenizer.json behind the Tokenizer interface: ids of the library, streaming as decoding, stop ids."""

import copy
import json
import pickle
import random

import pytest
import torch
from hf_directories import write_tokenizer
from tiny_models import CHAT_TEMPLATE
from tiny_tokenizers import plain_bpe
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

import realizar_torch as rt
from realizar_torch.checkpoint.tokenizer_json import JsonTokenizer, tokenizer_metadata

TEXTS = (
    "the cat and the hat",
    " the cat is in the box",
    "tabs\tand\nnewlines\n\n and   spaces ",
    "Zwölf Boxkämpfer 日本語 🙂🏳️‍🌈",
    "",
    "<|im_start|>user",
)


@pytest.fixture
def directory(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def bpe(directory) -> JsonTokenizer:
    return JsonTokenizer.from_metadata(tokenizer_metadata(directory))


def sentence_piece() -> JsonTokenizer:
    """As transformers writes llama's: a space in front, unknown characters as bytes."""
    words = ["▁", "▁the", "▁cat", "t", "h", "e", "c", "a", "▁t", "he", "at"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return JsonTokenizer(tokenizer.to_str(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("make", [None, sentence_piece])
def test_ids_are_the_library_s_and_decode_back(make, bpe, directory):
    tokenizer = bpe if make is None else make()
    library = Tokenizer.from_str(tokenizer._text)
    for text in TEXTS:
        assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokenizer.decode(torch.tensor(ids, dtype=torch.int64), skip_special_tokens=False) == text


def test_the_text_of_special_tokens_is_text_unless_asked_otherwise(bpe):
    """Field fault 45: a user must not be able to write control tokens."""
    assert bpe.encode("<|im_start|>", parse_special=True) == [1]
    ids = bpe.encode("<|im_start|>")
    assert 1 not in ids and len(ids) == 12
    # both ways again: one does not change the other
    assert bpe.encode("<|im_start|>", parse_special=True) == [1] and bpe.encode("<|im_start|>") == ids


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_in_copies_too(duplicate, bpe):
    expected = bpe.encode("<|im_start|>"), bpe.encode("<|im_start|>", parse_special=True)
    other = duplicate(bpe)
    assert (other.encode("<|im_start|>"), other.encode("<|im_start|>", parse_special=True)) == expected
    assert bpe.encode("<|im_start|>") == expected[0]


def test_what_tokenizer_json_adds_is_added(directory):
    from tokenizers.processors import TemplateProcessing

    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.post_processor = TemplateProcessing("<|im_start|> $0", special_tokens=[("<|im_start|>", 1)])
    library.save(str(directory / "tokenizer.json"))
    tokenizer = JsonTokenizer.from_metadata(tokenizer_metadata(directory))
    plain = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [1, *plain]


@pytest.mark.parametrize("make", [None, sentence_piece])
@pytest.mark.parametrize("skip", [True, False])
def test_streaming_is_decoding(make, skip, bpe):
    """Any ids: characters cut anywhere, bytes that are none, special tokens between the bytes of one."""
    tokenizer = bpe if make is None else make()
    source = random.Random(3)
    bodies = [tokenizer.encode(text) for text in TEXTS]
    bodies += [tokenizer.encode("".join(source.choices("the cat é日🙂\n", k=12))) for _ in range(300)]
    bodies += [[source.randrange(tokenizer.vocab_size) for _ in range(20)] for _ in range(300)]
    # bytes and special tokens only
    bodies += [[source.randrange(3 + 256) for _ in range(12)] for _ in range(300)]
    for ids in bodies:
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        streamed = "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])
        decoded = tokenizer.decode(ids, skip_special_tokens=skip)
        # the decoder of the second kind takes back good bytes of a run that goes bad; what was shown stays
        if make is None or "�" not in decoded:
            assert streamed == decoded, ids


def test_a_character_comes_whole(bpe):
    detokenizer = bpe.detokenizer()
    pieces = [detokenizer.push(token) for token in bpe.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"] and detokenizer.flush() == ""


@pytest.mark.parametrize("token", [-1, 273, 1 << 40])
def test_foreign_ids_are_refused(bpe, token):
    with pytest.raises(rt.FormatError, match=f"token id {token} is outside"):
        bpe.decode([5, token])
    with pytest.raises(rt.FormatError, match="outside"):
        bpe.detokenizer().push(token)
    with pytest.raises(rt.FormatError, match="lone surrogate"):
        bpe.encode("a\ud800")


@pytest.mark.parametrize("kind", ["json", "gguf"])
def test_what_is_no_text_or_no_id_is_refused(kind, bpe):
    """The commonest slip: the whole output of ``generate``, [1, T], instead of its row."""
    tokenizer = bpe if kind == "json" else plain_bpe()
    batch = torch.tensor([tokenizer.encode("the cat")])
    with pytest.raises(rt.FormatError, match=r"a token id is tensor\(.*expected an integer.*ids\[0\]"):
        tokenizer.decode(batch)
    assert tokenizer.decode(batch[0]) == "the cat"
    for ids in (None, 5, torch.tensor(5)):
        with pytest.raises(rt.FormatError, match=r"the ids are .*, expected a list of ids"):
            tokenizer.decode(ids)
    for text in (None, b"the cat", ["the", "cat"]):
        with pytest.raises(rt.FormatError, match=f"the text is a {type(text).__name__}, expected a str"):
            tokenizer.encode(text)


@pytest.mark.parametrize("skip", [True, False])
def test_ids_that_pad_the_model_s_vocabulary_are_no_text(directory, skip):
    """As llama.cpp's converter pads a vocabulary: Qwen's models have 151936 rows for 151669 tokens."""
    tokenizer = JsonTokenizer.from_metadata(tokenizer_metadata(directory), model_vocab_size=280)
    ids = [273, *tokenizer.encode("the "), 279, *tokenizer.encode("cat"), 275]
    assert tokenizer.vocab_size == 273 and tokenizer.decode(ids, skip_special_tokens=skip) == "the cat"
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == "the cat"
    assert tokenizer.is_special(279) and not tokenizer.is_special(272)
    with pytest.raises(rt.FormatError, match="token id 280 is outside the vocabulary of 280"):
        tokenizer.decode([280])


def test_every_stop_id_counts(directory):
    """Field fault 45: those of config.json and generation_config.json, and end-of-turn texts."""
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 10**6, "x", True]}))
    tokenizer = JsonTokenizer.from_metadata(tokenizer_metadata(directory))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.eos_token_ids == (0, 2, 7, 9)


def test_chat_templates_render_as_transformers_renders_them(directory, bpe):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    messages = [
        {"role": "system", "content": "the cat"},
        {"role": "user", "content": "and the <|im_end|> hat"},
    ]
    expected = reference.apply_chat_template(
        messages, chat_template=CHAT_TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    assert bpe.apply_chat_template(messages, tokenize=False) == expected
    assert bpe.apply_chat_template(messages) == reference.encode(expected, add_special_tokens=False)
    bpe.chat_template = None
    with pytest.raises(rt.UnsupportedArchitectureError, match=r"no chat template.*set tokenizer"):
        bpe.apply_chat_template(messages)


def test_the_template_may_end_turns_by_a_token_that_no_file_names(directory):
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.add_special_tokens([AddedToken("<|done|>", special=True)])
    library.add_tokens([AddedToken("<shown>")])
    template = "{% for m in messages %}{{ m.content }}<shown>TOKEN{% endfor %}"
    for token, expected in (("<|done|>", (273,)), ("<|im_end|>", ()), ("", ())):
        text = template.replace("TOKEN", token)
        tokenizer = JsonTokenizer(library.to_str(), {"eos_token": "<|im_end|>"}, chat_template=text)
        assert tokenizer.turn_end_ids == expected


@pytest.mark.parametrize("form", ["jinja", "config", "named", "none"])
def test_where_a_template_may_stand(directory, form):
    (directory / "chat_template.jinja").unlink()
    value = {
        "config": "T",
        "named": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}],
    }
    if form == "jinja":
        (directory / "chat_template.jinja").write_text("T")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": value.get(form)}))
    found = tokenizer_metadata(directory).get("tokenizer.chat_template")
    assert found == (None if form == "none" else "T")


@pytest.mark.parametrize("template", [{"default": "T"}, ["T"], 5])
def test_a_chat_template_that_is_no_text_is_refused(template, bpe):
    bpe.chat_template = template
    with pytest.raises(rt.FormatError, match="expected the text of a jinja2 template"):
        bpe.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_text_that_the_library_cannot_encode_is_refused():
    library = Tokenizer(models.WordLevel({"a": 0}))
    with pytest.raises(rt.FormatError, match=r"tokenizer\.json cannot encode the text: .*UNK"):
        JsonTokenizer(library.to_str(), {}).encode("b")
