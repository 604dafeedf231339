"""Perplexity where logits are no numbers or losses too large, and arguments that mean nothing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realizar_torch.errors import CacheFullError, FormatError, RealizarError
from realizar_torch.evaluation import perplexity

LETTERS = 8
TEXT = "abcdefgh" * 4


class Letters:
    bos_token_id = None

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) - ord("a") for letter in text]

    def detokenizer(self):
        raise AssertionError("perplexity decodes nothing")


class Alphabet:
    """Knows the alphabet: what follows in it has a logit of ``strength`` more than the others."""

    def __init__(self, strength: float) -> None:
        self.config = SimpleNamespace(vocab_size=LETTERS, context_length=16)
        self.max_seq_len, self.eos_token_ids, self.device = 16, (), torch.device("cpu")
        self.table = strength * torch.eye(LETTERS).roll(1, dims=1)

    def __call__(self, tokens, *, logits_to_keep):
        return SimpleNamespace(logits=self.table[tokens[:, -logits_to_keep:]])


def test_the_loss_of_a_known_alphabet():
    result = perplexity(Alphabet(2.0), Letters(), TEXT, context=np.int64(8), chunks=np.int64(3))
    assert result.scored_tokens == 9
    assert result.value == pytest.approx(1 + (LETTERS - 1) * math.exp(-2), rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_refused_with_their_chunk(wrong):
    model, seen = Alphabet(2.0), []
    # "h" follows "g" in the second chunk for the first time
    model.table[6, 7] = wrong
    with pytest.raises(RealizarError, match=r"loss of chunk 1 is .* NaN or infinite"):
        perplexity(model, Letters(), "abcdabcd" + TEXT, context=8, progress=seen.append)
    assert [len(result.losses) for result in seen] == [1]


def test_a_perplexity_beyond_all_floats_is_infinite():
    """Every letter is taken for the least likely: 800 nats each."""
    result = perplexity(Alphabet(-800.0), Letters(), TEXT, context=8)
    assert result.losses[0] / 3 == pytest.approx(800 + math.log(LETTERS - 1), rel=1e-6)
    assert result.value == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": 0}, "chunks is 0; expected at least 1"),
        ({"chunks": -1}, "chunks is -1; expected at least 1"),
        ({"chunks": 1.5}, "chunks is 1.5; expected an integer"),
        ({"chunks": True}, "chunks is True; expected an integer"),
        ({"chunks": "all"}, "chunks is 'all'; expected an integer"),
        ({"chunks": 5}, "4 chunks of 8; expected at least 5"),
        ({"context": 3}, "context is 3; expected at least 4"),
        ({"context": 8.0}, "context is 8.0; expected an integer"),
        ({"context": None}, "context is None; expected an integer"),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear; expected what rt.load returns first"),
        ({"tokenizer": None}, "tokenizer is a NoneType; expected what rt.load returns second"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(changes, message):
    arguments = {"model": Alphabet(2.0), "tokenizer": Letters(), "text": TEXT, "context": 8} | changes
    with pytest.raises(FormatError) as refused:
        perplexity(arguments.pop("model"), arguments.pop("tokenizer"), arguments.pop("text"), **arguments)
    assert message in str(refused.value)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(CacheFullError, match="context is 17, but the model was made for 16"):
        perplexity(Alphabet(2.0), Letters(), TEXT, context=17)
