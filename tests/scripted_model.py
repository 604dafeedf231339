"""A scripted model and tokenizer for tests of the generation loop: what they say is decided by a table."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from realizar_torch.generation import loop

VOCAB = 30
EOS, PAD = 1, 0


class MarkovModel:
    """Logits depend on the last token only: a row of a random table. Steps write into one reused buffer."""

    def __init__(self, max_seq_len: int = 64, pad_token_id: int | None = PAD) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, context_length=128)
        self.max_seq_len, self.batch_size = max_seq_len, 1
        self.eos_token_ids, self.pad_token_id = (EOS, 2), pad_token_id
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.cache_dtype = self.dtype
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
        self.table[:, :3] -= 20
        self.steps = self.prefills = 0
        self.fed: list[list[int]] = []
        self.mask: torch.Tensor | None = None
        self.buffer = torch.empty(0)

    def follow(self, script: list[int]) -> None:
        """Makes each token of ``script`` the likeliest successor of the one before it."""
        for last, following in itertools.pairwise(script):
            self.table[last, following] = 50.0

    def chain(self, last: int, count: int) -> list[int]:
        """Greedy successors of ``last``."""
        ids = []
        for _ in range(count):
            last = int(self.table[last].argmax())
            ids.append(last)
        return ids


class Letters:
    """Token 3 is "a", 4 is "b" …; token 29 is the first half of "é" and 28 its second half."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 3 for letter in text]

    def apply_chat_template(self, messages, *, add_generation_prompt):
        assert add_generation_prompt
        return self.encode("".join(message["content"] for message in messages))

    def detokenizer(self):
        held = []

        def push(token: int) -> str:
            if token == 29:
                held.append(token)
                return ""
            if token == 28 and held:
                held.clear()
                return "é"
            return chr(token - 3 + ord("a"))

        return SimpleNamespace(push=push, flush=lambda: "\N{REPLACEMENT CHARACTER}" if held else "")


def scripted(monkeypatch: pytest.MonkeyPatch) -> MarkovModel:
    """A new model, with the loop's prefill and step replaced by lookups in its table."""

    def new_state(model, batch_size, max_positions):
        return SimpleNamespace(batch_size=batch_size, free=max_positions, decoder=None, close=lambda: None)

    def prefill(model, input_ids, attention_mask, state, *, cuda_graph):
        model.prefills += 1
        model.mask = attention_mask
        state.free -= input_ids.shape[1]
        assert state.free >= 0
        model.buffer = torch.zeros(state.batch_size, len(model.table))
        return model.buffer.copy_(model.table[input_ids[:, -1]])

    def decode_step(model, token_ids, state):
        model.steps += 1
        model.fed.append(token_ids.tolist())
        state.free -= 1
        assert state.free >= 0
        assert token_ids.shape == (state.batch_size,) and token_ids.dtype == torch.int64
        return model.buffer.copy_(model.table[token_ids])

    for function in (new_state, prefill, decode_step):
        monkeypatch.setattr(loop, function.__name__, function)
    # this model has no weights to read
    monkeypatch.setattr(loop, "decode_bytes", lambda *args: 0)
    return MarkovModel()
