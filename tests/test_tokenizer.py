"""The tokenizer equals llama.cpp: ids, special tokens and end-of-generation ids, from committed goldens."""

import hashlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.pretokenizers import PRE_TOKENIZERS
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.errors import FormatError, GGUFError, UnsupportedArchitectureError

DATA = Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"tokenizer_{name}.json").read_text())


PRE = load("pre")
SENTENCE_PIECE = load("sentence_piece")


def tiny_bpe(**changes: Any) -> Tokenizer:
    """Over the golden byte-level vocabulary; `bos_token_id=3` replaces that key, None removes one."""
    metadata = PRE["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


def tiny_spm(**changes: Any) -> Tokenizer:
    metadata = SENTENCE_PIECE["metadata"]
    metadata = metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


plain_bpe, plain_spm = cache(tiny_bpe), cache(tiny_spm)


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
        assert tokenizer.encode("a©b") == [0, 1]
        assert tokenizer.encode("ab") == [3]

    def test_merges_into_a_text_that_is_no_token(self) -> None:
        # ab merges before bc does, although ab is no token: what comes out are the characters
        tokens = ["a", "b", "c", "bc", "<|endoftext|>"]
        tokenizer = tiny_bpe(tokens=tokens, token_type=[1] * 4 + [3], merges=["a b", "b c", "a b"])
        assert tokenizer.encode("abc") == [0, 1, 2]
        assert tokenizer.encode("bc") == [3]


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
        tokenizer = plain_spm()
        assert tokenizer.decode(tokenizer.encode(text)) == text


class TestSpecialTokens:
    def test_control_tokens_come_from_text_only_when_asked_for(self) -> None:
        tokenizer = tiny_bpe()
        end = tokenizer.vocab_size - 1
        assert end not in tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.encode("a<|endoftext|>b", parse_special=True).count(end) == 1

    def test_user_defined_tokens_always_do(self) -> None:
        tokens = PRE["metadata"]["tokenizer.ggml.tokens"]
        think = len(tokens)
        kinds = [*PRE["metadata"]["tokenizer.ggml.token_type"], 4, 4]
        tokenizer = tiny_bpe(tokens=[*tokens, "<think>", "<th"], token_type=kinds)
        ids = tokenizer.encode("a<think>b<th")
        # the longer token goes first, whatever is found further left
        assert ids.count(think) == 1 and ids.count(think + 1) == 1
        assert tokenizer.decode(ids) == "a<think>b<th"

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"eos_token_id": 1}, [1]),
            ({"eos_token_id": 2, "eot_token_id": 7}, [2, 7]),
            ({"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 5, "fim_sep_token_id": 3}, [2, 3, 5, 7]),
            ({"eos_token_id": 99999, "eot_token_id": 7}, [7]),
            ({}, []),
        ],
    )
    def test_end_of_generation_by_id(self, keys: dict[str, int], expected: list[int]) -> None:
        tokens = [f"t{i}" for i in range(8)]
        names = {"bos_token_id": None, "eos_token_id": None, "tokens": tokens, "token_type": None, **keys}
        assert list(tiny_bpe(**names, merges=["t 0"]).eos_token_ids) == expected

    @pytest.mark.parametrize(
        ("tokens", "ending", "hidden"),
        [
            (["x", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "[EOT]"], [1, 2, 3, 4], [1, 2, 3, 4]),
            (["x", "<fim_pad>", "<reponame>", "<|file_sep|>", "<fim_middle>"], [1, 2, 3], [1, 2, 3, 4]),
            # the lowest of several texts for one role
            (["x", "[PAD]", "<PAD>"], [1], [1]),
            # gpt-oss: an answer has parts that end with <|end|>, and shows its channels
            (["x", "<|return|>", "<|call|>", "<|end|>", "<|channel|>"], [1, 2], [1, 2]),
            (["x", "<|call|>", "<|end|>"], [1, 2], [1, 2]),
            (["x", "<|tool_response>", "</s>"], [1], [1]),
            (["x", "</s>"], [1], [1]),
        ],
    )
    def test_end_of_generation_by_text(self, tokens: list[str], ending: list[int], hidden: list[int]) -> None:
        tokenizer = tiny_bpe(
            tokens=tokens, token_type=None, merges=["a b"], bos_token_id=None, eos_token_id=None
        )
        assert list(tokenizer.eos_token_ids) == ending
        assert [i for i in range(len(tokens)) if not tokenizer.decode([i])] == hidden

    def test_llama_models_have_bos_and_eos_by_default(self) -> None:
        tokenizer = tiny_spm()
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
        assert tiny_bpe(bos_token_id=None, eos_token_id=None, padding_token_id=-1).bos_token_id is None


class TestBos:
    """Model type × add_bos_token × a template that writes BOS: exactly one where one is wanted, else none."""

    @pytest.mark.parametrize("template_bos", [False, True])
    @pytest.mark.parametrize(("added", "bpe", "spm"), [(True, 1, 1), (False, 0, 0), (None, 0, 1)])
    def test_count(self, added: bool | None, bpe: int, spm: int, template_bos: bool) -> None:
        template = ("{{ bos_token }}" if template_bos else "") + "{{ messages[0].content }}"
        for tokenizer, count in ((tiny_bpe(add_bos_token=added), bpe), (tiny_spm(add_bos_token=added), spm)):
            ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=template)
            expected = max(count, int(template_bos))
            assert ids.count(tokenizer.bos_token_id) == expected
            assert ids[:expected] == [tokenizer.bos_token_id] * expected
            assert tokenizer.encode("hi").count(tokenizer.bos_token_id) == count

    def test_a_wanted_token_must_exist(self) -> None:
        with pytest.raises(GGUFError, match=r"adds BOS.*bos_token_id"):
            tiny_bpe(add_bos_token=True, bos_token_id=None)
        with pytest.raises(GGUFError, match=r"adds EOS.*eos_token_id"):
            tiny_bpe(add_eos_token=True, eos_token_id=10**6)

    def test_eos_is_added_to_texts_but_not_to_chats(self) -> None:
        tokenizer = tiny_spm(add_eos_token=True)
        assert tokenizer.encode("hi")[-1] == 2
        ids = tokenizer.apply_chat_template([{"role": "user"}], chat_template="hi")
        assert ids == tokenizer.encode("hi")[:-1]


class TestDecoding:
    def test_pieces_are_whole_characters_and_join_to_the_text(self) -> None:
        rng = random.Random(11)
        for tokenizer in (tiny_bpe(), tiny_spm()):
            for _ in range(200):
                ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
                for skip in (True, False):
                    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
                    pieces = [detokenizer.push(i) for i in ids]
                    raw = b"".join(tokenizer._pieces.piece(i, skip_special_tokens=skip) for i in ids)
                    if tokenizer._pieces.leading_space:
                        raw = raw.removeprefix(b" ")
                    text = "".join(pieces) + detokenizer.flush()
                    assert (
                        text
                        == raw.decode(errors="replace")
                        == tokenizer.decode(ids, skip_special_tokens=skip)
                    )

    def test_a_character_of_several_tokens_comes_whole(self) -> None:
        tokenizer = tiny_spm()
        ids = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)[-4:]
        detokenizer = tokenizer.detokenizer()
        assert [detokenizer.push(i) for i in ids] == ["", "", "", "\U0001f9ff"]
        assert detokenizer.flush() == ""

    def test_an_unfinished_character_becomes_a_replacement(self) -> None:
        tokenizer = tiny_spm()
        euro = tokenizer.encode("\U0001f9ff", add_special_tokens=False)[-4:]
        detokenizer = tokenizer.detokenizer()
        assert [detokenizer.push(i) for i in euro[:3]] == ["", "", ""]
        assert detokenizer.flush() == "�"
        # a byte that cannot continue it shows at once
        assert tokenizer.decode([*euro[:2], *tokenizer.encode("a", add_special_tokens=False)]) == "� a"

    def test_a_continued_prompt_keeps_the_space(self) -> None:
        tokenizer = tiny_spm()
        detokenizer = tokenizer.detokenizer()
        for token in tokenizer.encode("The capital is"):
            detokenizer.push(token)
        assert "".join(map(detokenizer.push, tokenizer.encode("Paris", add_special_tokens=False))) == " Paris"

    def test_tensors_decode(self) -> None:
        tokenizer = tiny_bpe()
        assert tokenizer.decode(torch.tensor(tokenizer.encode("It works"))) == "It works"

    @pytest.mark.parametrize("token", [-1, 10**6])
    def test_ids_outside_the_vocabulary_are_refused(self, token: int) -> None:
        with pytest.raises(FormatError, match=f"token id {token} is outside"):
            tiny_bpe().decode([token])


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
