"""The tokenizer of rt.hf.from_gguf gives the ids of our own, which equal llama.cpp's."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tokenizer_metadata
from tiny_tokenizers import PRE, SENTENCE_PIECE, VECTORS, load
from transformers import AutoTokenizer

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.pretokenizers import PRE_TOKENIZERS
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.hf.merges import merge_pairs
from realizar_torch.hf.tokenizer import build_tokenizer

TEXTS = [text for text, *_ in (*load("smollm2")["texts"], *load("gemma3")["texts"])]
ALPHABET = "abc \n\t'sYZ0123 éßñ日本語한국 ▁<|>im_start🙂\u200d.,!?-_{}()"


def random_texts(count: int) -> list[str]:
    generator = random.Random(5)
    return ["".join(generator.choices(ALPHABET, k=generator.randint(1, 40))) for _ in range(count)]


def both(metadata: dict[str, Any]) -> tuple[Tokenizer, Any]:
    own = Tokenizer.from_gguf(metadata)
    return own, build_tokenizer(own.vocabulary, metadata)


def check(metadata: Any, texts: list[str]) -> None:
    own, found = both(metadata)
    for text in texts:
        ids = own.encode(text, parse_special=True)
        assert found(text).input_ids == ids, text
        for hidden in (False, True):
            assert found.decode(ids, skip_special_tokens=hidden) == own.decode(
                ids, skip_special_tokens=hidden
            )


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_vocabularies(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"{name}_path")
    check(open_gguf(path).metadata, [*TEXTS, *random_texts(300)])


@pytest.mark.parametrize("name", VECTORS["vocabularies"])
def test_llama_cpps_vectors(name: str) -> None:
    metadata = VECTORS["vocabularies"][name]["metadata"]
    # these vocabularies are cut down, and merging this text passes through a token that was cut
    check(metadata, [text for text in VECTORS["texts"] if text != "Vieết Nam"])


@pytest.mark.parametrize("rule", sorted(PRE_TOKENIZERS)[::4])
def test_pre_tokenizers(rule: str) -> None:
    check(PRE["metadata"] | {"tokenizer.ggml.pre": rule}, random_texts(60))


@pytest.mark.parametrize("variant", SENTENCE_PIECE["variants"], ids=lambda v: str(v["metadata"]))
def test_sentence_piece(variant: dict[str, Any]) -> None:
    # a vocabulary without an x of its own; transformers merges only what begins as tokens
    texts = [text for text in (*SENTENCE_PIECE["texts"], *random_texts(60)) if "x" not in text]
    if "general.name" in variant["metadata"]:
        # where a token of two spaces swallows the spaces behind it, the two libraries differ
        texts = [text for text in texts if "  " not in text]
    check(SENTENCE_PIECE["metadata"] | variant["metadata"], texts)


def test_phi_3_swallows_spaces_behind_its_tokens() -> None:
    metadata = SENTENCE_PIECE["metadata"] | {"general.name": "Phi-3 mini"}
    _, found = both(metadata)
    check(metadata, ["<|user|> \n a <|end|>\t a", "<s> a"])
    assert found("<|user|> \n a").input_ids == found("<|user|>a").input_ids


def test_special_tokens_templates_and_padding() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.token_type": [3] * 3 + [1] * 270}
    own, found = both(metadata)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "is <|im_end|>"}]
    ids = found.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == own.apply_chat_template(messages)
    batch = found(["the", "the cat"], padding=True)
    assert batch.attention_mask == [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]] and batch.input_ids[0][:3] == [0, 0, 0]


def test_without_a_padding_token_the_end_of_text_pads() -> None:
    metadata = {key: value for key, value in tokenizer_metadata().items() if "padding" not in key}
    metadata["tokenizer.ggml.token_type"] = [3] * 3 + [1] * 270
    assert both(metadata)[1].pad_token_id == 2


@pytest.mark.parametrize("adds", ["bos", "eos"])
def test_bos_and_eos_are_added_if_the_file_says_so(adds: str) -> None:
    check(
        PRE["metadata"] | {"tokenizer.ggml.pre": "gpt-2", f"tokenizer.ggml.add_{adds}_token": True}, TEXTS[:9]
    )


@pytest.mark.parametrize(
    "metadata", [PRE["metadata"] | {"tokenizer.ggml.pre": "qwen2"}, SENTENCE_PIECE["metadata"]]
)
def test_saved_and_loaded(metadata: dict[str, Any], tmp_path: Path) -> None:
    _, found = both(metadata | {"tokenizer.chat_template": "{{ messages[0].content }}"})
    found.model_max_length = 2048
    found.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:20]:
        assert again(text).input_ids == found(text).input_ids
    assert again.chat_template == found.chat_template
    assert (again.padding_side, again.model_max_length) == ("left", 2048)


def test_merges_are_all_pairs_by_score() -> None:
    generator = random.Random(3)
    tokens = list({"".join(generator.choices("ab▁é", k=generator.randint(1, 5))) for _ in range(300)} | {""})
    scores = np.array([float(generator.randint(-9, 0)) for _ in tokens], np.float32)
    ids = {token: i for i, token in enumerate(tokens)}
    expected = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for i, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    left, right = merge_pairs(tokens, scores)
    assert len(expected) > 300
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == [pair[1:] for pair in sorted(expected)]
