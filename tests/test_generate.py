"""The generation loop on a scripted model: transformers' semantics, stops, streamers, early errors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted_model import EOS, PAD, VOCAB, Letters, MarkovModel, scripted

import realizar_torch as rt
from realizar_torch.errors import BackendUnavailableError, CacheFullError, FormatError, RealizarError
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.text import stream


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> MarkovModel:
    return scripted(monkeypatch)


def prompt(*ids: int) -> torch.Tensor:
    return torch.tensor([ids])


def test_greedy_follows_the_likeliest_tokens(model):
    ids = generate_ids(model, prompt(7, 9), max_new_tokens=12)
    assert ids.tolist() == [[7, 9, *model.chain(9, 12)]]
    assert ids.dtype == torch.int64
    assert model.steps == 11


def test_rows_that_end_early_are_filled_with_pad(model):
    model.follow([5, 6, 7, EOS])
    model.follow([20, 21, 22, 23, 24, 2])
    ids = generate_ids(model, prompt(5, 20).T, max_new_tokens=20)
    assert ids.tolist() == [[5, 6, 7, EOS, PAD, PAD], [20, 21, 22, 23, 24, 2]]
    assert model.fed == [[6, 21], [7, 22], [EOS, 23], [PAD, 24]]


@pytest.mark.parametrize(("eos", "expected"), [(7, [6, 7]), ([9, 7], [6, 7]), ((8,), [6, 7, 8])])
def test_own_stop_ids_replace_those_of_the_file(model, eos, expected):
    model.follow([5, 6, 7, 8, EOS, 8])
    assert generate_ids(model, prompt(5), max_new_tokens=9, eos_token_id=eos).tolist() == [[5, *expected]]


def test_an_empty_list_of_stop_ids_never_stops(model):
    model.follow([5, EOS, 6, 5])
    ids = generate_ids(model, prompt(5), max_new_tokens=7, eos_token_id=[])
    assert ids.tolist() == [[5, EOS, 6, 5, EOS, 6, 5, EOS]]


def test_pad_defaults_to_a_stop_id_where_the_file_has_none(model):
    model.pad_token_id = None
    model.follow([5, EOS])
    model.follow([6, 7, 8, 2])
    assert generate_ids(model, prompt(5, 6).T, max_new_tokens=5).tolist() == [[5, EOS, 1, 1], [6, 7, 8, 2]]
    assert generate_ids(model, prompt(5, 6).T, max_new_tokens=5, pad_token_id=29)[0].tolist() == [
        5,
        EOS,
        29,
        29,
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_other_integer_dtypes_are_accepted(model, dtype):
    ids = generate_ids(model, prompt(7, 9).to(dtype), max_new_tokens=3)
    assert ids.tolist() == [[7, 9, *model.chain(9, 3)]]
    assert ids.dtype == torch.int64


def test_no_new_tokens_is_the_prompt_and_no_compute(model):
    assert generate_ids(model, prompt(7, 9), max_new_tokens=0).tolist() == [[7, 9]]
    assert model.prefills == 0


def test_the_whole_cache_is_usable_and_not_one_position_more(model):
    model.max_seq_len = 32
    assert generate_ids(model, prompt(*range(3, 23)), max_new_tokens=12, eos_token_id=[]).shape == (1, 32)
    prefills = model.prefills
    with pytest.raises(CacheFullError, match=r"prompt of 20 \+ 13 new tokens need 33 positions.*has 32"):
        generate_ids(model, prompt(*range(3, 23)), max_new_tokens=13)
    with pytest.raises(CacheFullError, match="prompt of 33"):
        generate_ids(model, torch.full((1, 33), 5), max_new_tokens=0)
    assert model.prefills == prefills


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        (torch.tensor([3, 4]), r"\[2\]"),
        (torch.zeros(2, 0, dtype=torch.int64), r"\[2, 0\]"),
        (torch.zeros(0, 3, dtype=torch.int64), r"\[0, 3\]"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), r"\[1, 2, 2\]"),
        (torch.tensor([[3.0]]), "float32"),
        (torch.tensor([[True]]), "bool"),
        ([[3, 4]], "list"),
        (torch.tensor([[3, VOCAB]]), f"token {VOCAB}"),
        (torch.tensor([[-1, 3]]), "token -1"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), "meta tensor"),
        (torch.tensor([[3, 4]]).to_sparse(), "sparse_coo tensor"),
        (torch.nested.as_nested_tensor([torch.tensor([3, 4])], layout=torch.jagged), "nested tensor"),
    ],
)
def test_impossible_input_ids_are_refused(model, input_ids, message):
    with pytest.raises(FormatError, match=message):
        generate_ids(model, input_ids, max_new_tokens=1)
    assert model.prefills == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": -1}, FormatError, "max_new_tokens"),
        ({"max_new_tokens": 2.0}, FormatError, "max_new_tokens"),
        ({"do_sample": True, "top_p": 1.5}, FormatError, "top_p"),
        ({"repetition_penalty": 0}, FormatError, "repetition_penalty"),
        ({"repetition_penalty": 1e-38, "do_sample": True}, FormatError, "1e-06 to 1e"),
        ({"eos_token_id": ["x"]}, FormatError, "eos_token_id"),
        ({"eos_token_id": -1}, FormatError, "eos_token_id is -1"),
        ({"eos_token_id": [3, VOCAB]}, FormatError, f"eos_token_id is {VOCAB}"),
        ({"attention_mask": torch.ones(1, 1, device="meta")}, FormatError, "attention_mask is a meta"),
        ({"stop_strings": ["x"], "tokenizer": 5}, FormatError, "tokenizer is a int"),
        ({"pad_token_id": VOCAB}, FormatError, "pad_token_id"),
        ({"stop_strings": ["x"]}, FormatError, "tokenizer"),
        ({"stop_strings": [""], "tokenizer": Letters()}, FormatError, "stop_strings"),
        ({"cuda_graph": True}, BackendUnavailableError, "cuda_graph"),
        ({"cuda_graph": "yes"}, FormatError, "cuda_graph"),
        ({"max_length": 20}, TypeError, "max_length"),
        ({"num_beams": 4}, TypeError, "num_beams"),
    ],
)
def test_wrong_or_unknown_options_are_refused_before_compute(model, options, error, message):
    with pytest.raises(error, match=message):
        generate_ids(model, prompt(5), **{"max_new_tokens": 1, **options})
    assert model.prefills == 0


def test_sampling_options_without_sampling_warn(model):
    with pytest.warns(UserWarning, match="do_sample"):
        generate_ids(model, prompt(5), max_new_tokens=1, temperature=0.7)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0], [1, 1, 1]], "row 0 .* left"),
        ([[1, 1, 1], [1, 0, 1]], "row 1 .* hole"),
        ([[1, 1, 1], [0, 0, 0]], "row 1 "),
        ([[1, 1, 1], [0, 2, 1]], "0 and 1"),
        ([[1, 1], [1, 1]], r"\[2, 3\]"),
    ],
)
def test_masks_other_than_left_padding_are_refused(model, mask, message):
    with pytest.raises(FormatError, match=message):
        generate_ids(model, torch.full((2, 3), 5), torch.tensor(mask), max_new_tokens=1)
    assert model.prefills == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_left_padding_mask_reaches_prefill_as_bool(model, dtype):
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]], dtype=dtype)
    generate_ids(model, torch.tensor([[PAD, PAD, 5], [6, 7, 8]]), mask, max_new_tokens=1)
    assert model.mask is not None and model.mask.tolist() == [[False, False, True], [True, True, True]]
    generate_ids(model, torch.full((2, 3), 5), torch.ones(2, 3, dtype=dtype), max_new_tokens=1)
    assert model.mask is None


def test_a_forgotten_mask_is_inferred_unless_pad_may_be_text(model):
    ids = torch.tensor([[PAD, PAD, 5], [6, PAD, 8]])
    generate_ids(model, ids, max_new_tokens=1)
    assert model.mask is not None and model.mask.tolist() == [[False, False, True], [True, True, True]]
    model.eos_token_ids = (PAD,)
    with pytest.warns(UserWarning, match="attention_mask"):
        generate_ids(model, ids, max_new_tokens=1)
    assert model.mask is None


def test_repetition_penalty_ignores_padding_and_remembers_new_tokens(model):
    model.table[:] = 0.0
    model.table[:, 3:9] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    model.table[:, PAD] = 5.5
    ids = torch.tensor([[PAD, 3, 4], [9, 9, 3]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    new = generate_ids(model, ids, mask, max_new_tokens=3, repetition_penalty=100.0)[:, 3:]
    assert new.tolist() == [[PAD, 5, 6], [PAD, 4, 5]]


def test_sampling_depends_on_the_seed_only(model):
    def run(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        options = {"do_sample": True, "temperature": 2.0, "top_k": 8, "generator": generator}
        return generate_ids(model, prompt(5, 6).T, max_new_tokens=15, **options).tolist()

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_without_a_distribution_name_the_step_and_give_no_text(model, value):
    model.follow([5, 6, 7, 8])
    model.table[7, 11] = value
    answer = stream(model, Letters(), "c", max_new_tokens=9)
    with pytest.raises(RealizarError, match=r"row 0 .* step 2"):
        for _ in answer:
            pass
    assert answer.token_ids == [6, 7]


def test_streamer_gets_prompt_tokens_and_the_end_even_after_an_error(model):
    class Streamer:
        def __init__(self):
            self.values = []
            self.ended = 0

        def put(self, value):
            self.values.append(value.tolist())

        def end(self):
            self.ended += 1

    model.follow([5, 6, 7, EOS])
    streamer = Streamer()
    generate_ids(model, prompt(4, 5), max_new_tokens=9, streamer=streamer)
    assert streamer.values == [[[4, 5]], [6], [7], [EOS]]
    assert streamer.ended == 1
    model.table[7] = math.nan
    with pytest.raises(RealizarError):
        generate_ids(model, prompt(4, 5), max_new_tokens=9, streamer=streamer)
    assert streamer.ended == 2


@pytest.mark.parametrize("streamer", [5, print, SimpleNamespace(put=print)])
def test_what_is_no_streamer_is_refused_before_any_step(model, streamer):
    with pytest.raises(FormatError, match=r"streamer is .* put"):
        generate_ids(model, prompt(4, 5), max_new_tokens=9, streamer=streamer)
    assert model.prefills == 0


def test_transformers_own_streamer_prints_the_text(model, capsys):
    from transformers import TextStreamer

    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(chr(int(i) - 3 + ord("a")) for i in ids))
    model.follow([5, 6, 7, 8])
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    generate_ids(model, prompt(4, 5), max_new_tokens=3, streamer=streamer)
    assert capsys.readouterr().out == "def\n"


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results_are_ordinary_tensors_in_every_grad_mode(model, grad):
    embedding = torch.nn.Embedding(VOCAB, 4)
    with grad():
        ids = generate_ids(model, prompt(5), max_new_tokens=4)
        assert torch.is_inference_mode_enabled() == (grad is torch.inference_mode)
    if grad is not torch.inference_mode:
        embedding(ids).sum().backward()


@pytest.mark.parametrize(
    ("option", "value"),
    [("eos_token_id", 3.5), ("stop_strings", 5), ("generator", 3), ("eos_token_id", {1: 2})],
)
def test_options_of_the_wrong_kind_are_named(model, option, value):
    with pytest.raises(FormatError, match=option):
        generate_ids(model, prompt(5), max_new_tokens=1, **{option: value})
    assert model.prefills == 0


def test_a_tensor_of_stop_ids_and_at_most_32_rows(model):
    stop = torch.tensor([model.chain(5, 1)[0]])
    assert generate_ids(model, prompt(5), max_new_tokens=9, eos_token_id=stop).shape == (1, 2)
    with pytest.raises(FormatError, match="33 sequences"):
        generate_ids(model, torch.full((33, 2), 5), max_new_tokens=1)


def test_numbers_of_numpy_are_numbers(model):
    ours = {"temperature": 0.75, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5}
    theirs = {name: np.float32(value) for name, value in ours.items()} | {"top_k": np.int64(5)}
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    ids = [
        generate_ids(model, prompt(5), max_new_tokens=9, do_sample=True, generator=seed, **options)
        for seed, options in zip(seeds, (ours, theirs), strict=True)
    ]
    assert torch.equal(*ids)
    eos = np.int64(int(ids[0][0, 3]))
    assert len(generate_ids(model, prompt(5), max_new_tokens=np.int64(9), eos_token_id=eos)[0]) <= 10


@pytest.mark.parametrize("other", [None, torch.nn.Linear(1, 1)])
def test_what_is_no_model_or_no_tokenizer_is_named(model, other):
    kind = type(other).__name__
    for call in (
        lambda: rt.generate(other, Letters(), "a", max_new_tokens=1),
        lambda: rt.stream(other, Letters(), "a", max_new_tokens=1),
        lambda: rt.BatchedGenerator(other),
        lambda: rt.PrefixCache(other),
    ):
        with pytest.raises(FormatError, match=f"model is a {kind}"):
            call()
    with pytest.raises(FormatError, match=f"tokenizer is a {kind}"):
        rt.generate(model, other, "a", max_new_tokens=1)
