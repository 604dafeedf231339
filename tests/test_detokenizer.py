"""Text from ids, all at once and as it grows: the same text, and never a broken character."""

import random

import pytest
import torch
from tiny_tokenizers import tiny_bpe, tiny_spm

from realizar_torch.errors import FormatError


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
