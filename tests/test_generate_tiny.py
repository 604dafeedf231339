"""generate on a tiny real model against transformers' generate: padded batches (F-47), penalty, overflow
(F-48)."""

from pathlib import Path

import pytest
import torch
from hf_reference import reference_model
from tiny_models import write_tiny_llama

import realizar_torch as rt
from realizar_torch.errors import CacheFullError

LENGTHS = (3, 7, 12)
NEW = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", seed=3)


@pytest.fixture(scope="module")
def reference(path: Path):
    return reference_model(path)


@pytest.fixture(scope="module")
def model(path: Path):
    return rt.load(path, activations="float", max_seq_len=32)[0]


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 3, 7 and 12 tokens, padded at the left with the file's pad id 0, and their mask."""
    ids = torch.randint(3, 273, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.arange(12) >= 12 - torch.tensor(LENGTHS)[:, None]
    return torch.where(mask, ids, 0), mask.long()


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_padded_batch_is_transformers_batch(model, reference, batch, penalty):
    ids, mask = batch
    options = {"max_new_tokens": NEW, "repetition_penalty": penalty, "eos_token_id": 2, "pad_token_id": 0}
    if penalty != 1:
        # transformers penalizes the padding too; at full length there is none
        ids, mask = ids[2:], mask[2:]
    expected = reference.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert torch.equal(model.generate(ids, mask, **options), expected)
    assert expected[:, 12:].unique().numel() > 5


def test_each_row_is_what_it_is_alone(model, batch):
    ids, mask = batch
    together = model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=[])
    for row, length in enumerate(LENGTHS):
        alone = model.generate(ids[row : row + 1, 12 - length :], max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(together[row, 12 - length :], alone[0])


def test_a_forgotten_mask_gives_the_same_or_a_warning(model, batch, monkeypatch):
    ids, mask = batch
    # this file's pad id, <|endoftext|>, also ends answers
    with pytest.warns(UserWarning, match="attention_mask"):
        model.generate(ids, max_new_tokens=1)
    monkeypatch.setattr(model, "eos_token_ids", (2,))
    expected = model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, eos_token_id=[]), expected)


def test_all_positions_of_the_cache_are_right_and_an_overflow_spoils_nothing(model, reference, batch):
    ids = batch[0][2:]
    expected = reference.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=[272], pad_token_id=0)
    assert torch.equal(model.generate(ids, max_new_tokens=20, eos_token_id=[272]), expected)
    with pytest.raises(CacheFullError, match="33"):
        model.generate(ids, max_new_tokens=21)
    assert torch.equal(model.generate(ids, max_new_tokens=20, eos_token_id=[272]), expected)


def test_a_stop_id_in_the_middle_fills_the_row_with_pad(model, batch):
    ids, mask = batch
    free = model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=[])
    stop = int(free[1, 12 + 4])
    ended = model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=stop)
    for row in range(3):
        new = free[row, 12:].tolist()
        length = new.index(stop) + 1 if stop in new else NEW
        assert ended[row, 12 : 12 + length].tolist() == new[: ended.shape[1] - 12][:length]
        assert set(ended[row, 12 + length :].tolist()) <= {0}
    assert 0 in ended[1, 12:]


def test_streamed_text_is_the_text_of_the_ids(path):
    model, tokenizer = rt.load(path, activations="float")
    prompt = "the cat is in the"
    stream = rt.stream(model, tokenizer, prompt, max_new_tokens=30)
    text = "".join(stream)
    ids = model.generate(torch.tensor([tokenizer.encode(prompt)]), max_new_tokens=30)
    assert stream.token_ids == ids[0, len(tokenizer.encode(prompt)) :].tolist()
    assert (
        text == tokenizer.decode(stream.token_ids) == rt.generate(model, tokenizer, prompt, max_new_tokens=30)
    )
