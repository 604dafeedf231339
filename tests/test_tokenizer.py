"""The tokenizer equals llama.cpp: ids, bytes of tokens and special ids, from committed goldens."""

import copy
import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import PRE, SENTENCE_PIECE, VECTORS, load, plain_bpe, plain_spm, tiny_bpe, tiny_spm

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.pretokenizers import PRE_TOKENIZERS
from realizar_torch.checkpoint.token_kinds import Kind
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.errors import FormatError, GGUFError, UnsupportedArchitectureError


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    path = request.getfixturevalue(f"{request.param}_path")
    return Tokenizer.from_gguf(open_gguf(path).metadata), load(request.param)


@pytest.mark.real_model
class TestRealVocabularies:
    def test_ids_equal_llama_cpp(self, real: tuple[Tokenizer, dict[str, Any]]) -> None:
        tokenizer, golden = real
        for text, plain, full in golden["texts"]:
            assert tokenizer.encode(text, add_special_tokens=False) == plain, text
            assert tokenizer.encode(text, parse_special=True) == full, text

    def test_special_ids_equal_llama_cpp(self, real: tuple[Tokenizer, dict[str, Any]]) -> None:
        tokenizer, golden = real
        assert tokenizer.bos_token_id == golden["bos_token_id"]
        assert tokenizer.eos_token_id == golden["eos_token_id"]
        assert list(tokenizer.eos_token_ids) == golden["eos_token_ids"]

    def test_the_bytes_of_every_token_equal_llama_cpp(self, real: tuple[Tokenizer, dict[str, Any]]) -> None:
        tokenizer, golden = real
        digest = hashlib.sha256()
        for token in range(tokenizer.vocab_size):
            for hidden in (False, True):
                piece = tokenizer._pieces.piece(token, skip_special_tokens=hidden)
                digest.update(b"%d:%s" % (len(piece), piece))
        assert digest.hexdigest() == golden["pieces_sha256"]

    def test_text_survives_the_round_trip(self, real: tuple[Tokenizer, dict[str, Any]]) -> None:
        tokenizer, golden = real
        for text, plain, _ in golden["texts"]:
            # SmolLM2 lacks some bytes, and SentencePiece cannot tell U+2581 from a space
            if "▁" not in text and text.isprintable() and all(ord(c) < 0xFFFF for c in text):
                assert tokenizer.decode(plain) == text


@pytest.mark.real_model
def test_the_pre_tokenizer_of_smollm2_is_its_own(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(smollm2_path).metadata)
    # transformers' conversion ignores tokenizer.ggml.pre and says 333, 216, 34, 35
    assert tokenizer.encode("    23") == [289, 34, 35]
    assert tokenizer.pad_token_id == 2


@pytest.mark.real_model
def test_smollm2_chat(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(smollm2_path).metadata)
    messages = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe <b>brief</b>.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(text, parse_special=True)
    # "<|im_start|>" is one token and, add_bos_token being false, no second one stands before it
    assert ids[0] == 1 and ids[1] != 1 and ids.count(1) == 3 and ids.count(2) == 2


@pytest.mark.real_model
def test_gemma3_has_no_template_of_its_own(gemma3_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(gemma3_path).metadata)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat_template is None
    with pytest.raises(UnsupportedArchitectureError, match="no chat template"):
        tokenizer.apply_chat_template(messages)
    bare = "<start_of_turn>user\n{{ messages[0]['content'] }}<end_of_turn>\n"
    ids = tokenizer.apply_chat_template(messages, chat_template=bare)
    assert ids[:2] == [2, 105] and 106 in ids
    assert tokenizer.apply_chat_template(messages, chat_template="{{ bos_token }}" + bare) == ids


class TestByteLevel:
    @pytest.mark.parametrize("name", PRE_TOKENIZERS)
    def test_every_pre_tokenizer_equals_llama_cpp(self, name: str) -> None:
        tokenizer = tiny_bpe(pre=name)
        (row,) = [row for row in PRE["rows"] if name in row["names"]]
        for text, ids in zip(PRE["texts"], row["ids"], strict=True):
            assert tokenizer.encode(text) == ids, text

    def test_the_goldens_tell_the_pre_tokenizers_apart(self) -> None:
        by_row = {name: PRE_TOKENIZERS[name] for row in PRE["rows"] for name in row["names"]}
        assert by_row == dict(PRE_TOKENIZERS)
        assert len(PRE["rows"]) == len(set(PRE_TOKENIZERS.values()))

    def test_an_unknown_pre_tokenizer_is_refused(self) -> None:
        with pytest.raises(
            UnsupportedArchitectureError, match=r"'kimi-k9'.*known are default, gpt-2.*smollm"
        ):
            tiny_bpe(pre="kimi-k9")

    def test_a_missing_pre_tokenizer_is_the_default_with_a_warning(self) -> None:
        text = "a,b 1234 $5"
        with pytest.warns(UserWarning, match="names no pre-tokenizer"):
            tokenizer = tiny_bpe(pre=None)
        assert tokenizer.encode(text) == tiny_bpe(pre="default").encode(text)

    def test_an_unknown_model_is_refused(self) -> None:
        with pytest.raises(UnsupportedArchitectureError, match=r"'bert'.*'gpt2'.*'llama'"):
            tiny_bpe(model="bert")

    @given(st.text())
    def test_any_text_survives_the_round_trip(self, text: str) -> None:
        tokenizer = plain_bpe()
        try:
            text.encode()
        except UnicodeEncodeError:
            with pytest.raises(FormatError, match="surrogate"):
                tokenizer.encode(text)
        else:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_bytes_that_the_vocabulary_lacks_are_dropped_as_in_llama_cpp(self) -> None:
        # é is C3 A9, written Ã© in the alphabet of bytes; this vocabulary has Ã, but no ©
        tokens = ["a", "b", "Ã", "ab", "<|endoftext|>"]
        tokenizer = tiny_bpe(tokens=tokens, token_type=[1] * 4 + [3], merges=["a b"], bos_token_id=None)
        assert tokenizer.encode("aéb") == [0, 2, 1]
        # ā is C4 81, both unknown; a and b must not meet over it
        assert tokenizer.encode("aāb") == [0, 1]
        assert tokenizer.encode("ab") == [3]

    def test_only_ascii_letters_make_a_contraction(self) -> None:
        # ſ (C5 BF) folds to s, but "'ſ" is no "'s" to llama.cpp: the word goes on
        tokens, merges = ["'", "Å", "¿", "a", "Å¿", "Å¿a"], ["Å ¿", "Å¿ a"]
        keys = {"token_type": None, "bos_token_id": None, "eos_token_id": None, "pre": "qwen2"}
        assert tiny_bpe(tokens=tokens, merges=merges, **keys).encode("'ſa") == [0, 5]

    def test_empty_tokens_are_told_apart_by_their_place(self) -> None:
        tokenizer = tiny_bpe(tokens=["a", "", "b", ""], token_type=None, merges=["a b"], bos_token_id=None)
        assert tokenizer.vocab_size == 4
        assert tokenizer.encode("ab") == [0, 2]
        assert tokenizer.decode([3]) == "[EMPTY_3]"

    def test_merges_into_a_text_that_is_no_token(self) -> None:
        # ab merges before bc does, although ab is no token: what comes out are the characters
        tokens = ["a", "b", "c", "bc", "<|endoftext|>"]
        tokenizer = tiny_bpe(tokens=tokens, token_type=[1] * 4 + [3], merges=["a b", "b c", "a b"])
        assert tokenizer.encode("abc") == [0, 1, 2]
        assert tokenizer.encode("bc") == [3]


@pytest.mark.parametrize("name", VECTORS["vocabularies"])
def test_llama_cpps_own_vectors(name: str) -> None:
    """Its vocabularies, cut down to what the vectors can touch (make_tokenizer_vectors.py)."""
    vocabulary = VECTORS["vocabularies"][name]
    tokenizer = Tokenizer.from_gguf(vocabulary["metadata"])
    original = vocabulary["original_ids"]
    vectors = [(text, ids) for text, ids in zip(VECTORS["texts"], vocabulary["ids"], strict=True) if ids]
    assert len(vectors) >= 45
    for text, ids in vectors:
        assert [original[token] for token in tokenizer.encode(text)] == ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


class TestSentencePiece:
    @pytest.mark.parametrize("variant", SENTENCE_PIECE["variants"], ids=lambda v: str(v["metadata"]))
    def test_equals_llama_cpp(self, variant: dict[str, Any]) -> None:
        tokenizer = Tokenizer.from_gguf(SENTENCE_PIECE["metadata"] | variant["metadata"])
        assert list(tokenizer.eos_token_ids) == variant["eos_token_ids"]
        for text, (plain, full) in zip(SENTENCE_PIECE["texts"], variant["ids"], strict=True):
            assert tokenizer.encode(text, add_special_tokens=False) == plain, text
            assert tokenizer.encode(text, parse_special=True) == full, text

    def test_of_equal_scores_the_leftmost_pair_merges_first(self) -> None:
        tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
        tokenizer = tiny_spm(tokens=tokens, token_type=None, scores=[0.0] * 7, add_bos_token=False)
        assert tokenizer.encode("bab")[-2:] == [6, 4]
        assert tokenizer.encode("abab")[-2:] == [5, 5]

    def test_text_is_cut_where_no_token_joins_it(self) -> None:
        # ">▁" is a token, so ">" and a space must stay together; the words around it may be cut
        tokens = ["<unk>", "<s>", "</s>", "a", ">", "▁", ">▁", "▁a", ">▁a"]
        scores = [0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -5.0, -6.0, -7.0]
        tokenizer = tiny_spm(
            tokens=tokens, token_type=None, scores=scores, add_bos_token=False, add_space_prefix=False
        )
        assert tokenizer.encode("a> a a") == [3, 8, 7]

    def test_the_space_in_front_is_no_part_of_the_text(self) -> None:
        tokenizer = tiny_spm()
        ids = tokenizer.encode("Hello there")
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids) == "Hello there"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> Hello there"
        # only one space, only at the start
        assert tokenizer.decode(tokenizer.encode("  two spaces")) == "  two spaces"
        assert tokenizer.decode(tokenizer.encode("a") + tokenizer.encode("b")) == "a b"

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
    def test_any_text_survives_the_round_trip(self, text: str) -> None:
        # a space goes in front of what is behind a user-defined token, too
        kinds = SENTENCE_PIECE["metadata"]["tokenizer.ggml.token_type"]
        tokenizer = plain_spm(token_type=tuple(Kind.NORMAL if k == Kind.USER_DEFINED else k for k in kinds))
        assert tokenizer.decode(tokenizer.encode(text)) == text


class TestBrokenMetadata:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tokens": None}, r"tokenizer\.ggml\.tokens: found None"),
            ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens: found 'abc'"),
            ({"tokens": ["a", "b", "a"]}, r"'a' is token 0 and token 2"),
            ({"token_type": [1, 1]}, r"token_type: .* expected an array of at least \d+ elements"),
            ({"merges": None}, r"tokenizer\.ggml\.merges: found None"),
            ({"merges": ["a b", "ab"]}, "merges holds 'ab'"),
            ({"add_bos_token": 1}, "add_bos_token: found 1"),
        ],
    )
    def test_byte_level(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(GGUFError, match=message):
            tiny_bpe(**changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scores": None}, r"tokenizer\.ggml\.scores: found None"),
            ({"scores": ["high"] * 10000}, "scores: found <U4, expected numbers"),
            ({"token_type": [6] * 10000}, r"token 0 is '<unk>', but .* byte"),
        ],
    )
    def test_sentence_piece(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(GGUFError, match=message):
            tiny_spm(**changes)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_tokenizer_that_has_rendered_messages_can_be_copied(duplicate: Any) -> None:
    tokenizer, messages = tiny_bpe(), [{"role": "user", "content": "the cat"}]
    tokenizer.chat_template = "{{ messages[0].content }}"
    ids = tokenizer.apply_chat_template(messages)
    assert (
        duplicate(tokenizer).apply_chat_template(messages) == ids == tokenizer.apply_chat_template(messages)
    )
