"""The generation loop on a scripted model: transformers' semantics, stops, streaming, early errors."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from realizar_torch.errors import BackendUnavailableError, CacheFullError, FormatError, RealizarError
from realizar_torch.generation import loop
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.stopping import HeldText
from realizar_torch.generation.text import generate_text, stream_text

VOCAB = 30
EOS, PAD = 1, 0


class MarkovModel:
    """Logits depend on the last token only: a row of a random table. Steps write into one reused buffer."""

    def __init__(self, max_seq_len: int = 64, pad_token_id: int | None = PAD) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB, context_length=128)
        self.max_seq_len, self.batch_size = max_seq_len, 1
        self.eos_token_ids, self.pad_token_id = (EOS, 2), pad_token_id
        self.device = torch.device("cpu")
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
        self.table[:, :3] -= 20
        self.steps = self.prefills = 0
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


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> MarkovModel:
    def new_state(model, batch_size, max_positions):
        return SimpleNamespace(batch_size=batch_size, free=max_positions)

    def prefill(model, input_ids, attention_mask, state):
        model.prefills += 1
        model.mask = attention_mask
        state.free -= input_ids.shape[1]
        assert state.free >= 0
        model.buffer = torch.zeros(state.batch_size, VOCAB)
        return model.buffer.copy_(model.table[input_ids[:, -1]])

    def decode_step(model, token_ids, state):
        model.steps += 1
        state.free -= 1
        assert state.free >= 0
        assert token_ids.shape == (state.batch_size,) and token_ids.dtype == torch.int64
        return model.buffer.copy_(model.table[token_ids])

    for function in (new_state, prefill, decode_step):
        monkeypatch.setattr(loop, function.__name__, function)
    return MarkovModel()


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
        ({"eos_token_id": ["x"]}, FormatError, "eos_token_id"),
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
    stream = stream_text(model, Letters(), "c", max_new_tokens=9)
    with pytest.raises(RealizarError, match=r"row 0 .* step 2"):
        for _ in stream:
            pass
    assert stream.token_ids == [6, 7]


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


def test_text_is_the_answer_without_prompt_and_stop_token(model):
    model.follow([*Letters().encode("xhello"), EOS])
    # "l" follows "l": the scripted model would never leave it
    model.table[14, 14], model.table[14, 17] = 0.0, 60.0
    assert generate_text(model, Letters(), "x", max_new_tokens=20) == "helo"
    messages = [{"role": "user", "content": "wx"}]
    assert generate_text(model, Letters(), messages, max_new_tokens=20) == "helo"
    assert generate_text(model, Letters(), "x", max_new_tokens=2) == "he"


def test_stream_tells_ids_reason_and_metrics(model):
    model.follow([*Letters().encode("xabc"), EOS])
    stream = stream_text(model, Letters(), "wx", max_new_tokens=20)
    assert stream.stop_reason is None
    assert list(stream) == ["a", "b", "c"]
    assert stream.token_ids == [3, 4, 5, EOS]
    assert stream.stop_reason == "eos"
    metrics = stream.metrics
    assert (metrics.prompt_tokens, metrics.new_tokens, metrics.rows) == (2, 4, 1)
    assert 0 < metrics.first_token <= metrics.last_token
    assert metrics.tokens_per_second == 3 / (metrics.last_token - metrics.first_token)


def test_stream_raises_at_the_call_and_leaves_grad_mode_alone(model):
    with pytest.raises(CacheFullError):
        stream_text(model, Letters(), "x", max_new_tokens=64)
    for prompt_without_tokens in ("", [], 5, ["a", "b"]):
        with pytest.raises(FormatError):
            stream_text(model, Letters(), prompt_without_tokens, max_new_tokens=1)
    for _ in stream_text(model, Letters(), "x", max_new_tokens=3):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_stop_string_across_tokens_cuts_the_text_and_keeps_the_ids(model):
    model.follow(Letters().encode("xabcdefg"))
    stream = stream_text(model, Letters(), "x", max_new_tokens=7, stop_strings=["cde", "zz"])
    assert list(stream) == ["a", "b"]
    assert stream.token_ids == Letters().encode("abcde")
    assert stream.stop_reason == "stop_string"
    ids = generate_ids(
        model, prompt(*Letters().encode("xabc")), max_new_tokens=7, stop_strings="de", tokenizer=Letters()
    )
    assert ids.tolist() == [Letters().encode("xabcde")]


def test_held_back_text_and_half_characters_come_at_the_end(model):
    model.follow(Letters().encode("xabcd"))
    stream = stream_text(model, Letters(), "x", max_new_tokens=3, stop_strings=["cdef"])
    assert list(stream) == ["a", "b", "c"]
    assert stream.stop_reason == "length"
    model.follow([4, 29, 28, 29])
    # stronger than what the first script has taught "b" and the second "é"
    model.table[4, 29] = model.table[28, 29] = 60.0
    stream = stream_text(model, Letters(), "b", max_new_tokens=3)
    assert list(stream) == ["é", "\N{REPLACEMENT CHARACTER}"]


def test_one_row_stops_at_its_string_while_the_other_goes_on(model):
    model.follow(Letters().encode("abcdefgh"))
    model.follow(Letters().encode("npqrstuv"))
    ids = generate_ids(
        model, prompt(3, 16).T, max_new_tokens=4, stop_strings=["bc"], tokenizer=Letters(), eos_token_id=[]
    )
    assert ids.tolist() == [[3, 4, 5, PAD, PAD], Letters().encode("npqrs")]


@pytest.mark.parametrize(
    ("stops", "pieces", "released", "stopped"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], False),
        (["abc"], ["xa", "bd", "abc!"], ["x", "abd", "", ""], True),
        (["aab"], ["aa", "a", "b"], ["", "a", "", ""], True),
        (["\n\n", "end"], ["one\n", "two e", "n", "x"], ["one", "\ntwo ", "", "enx", ""], False),
        (["cd", "bcde"], ["ab", "cd"], ["a", "b", ""], True),
        (["ab"], ["a"], ["", "a"], False),
    ],
)
def test_held_text_releases_all_that_is_certain(stops, pieces, released, stopped):
    held = HeldText(stops)
    assert [*[held.push(piece) for piece in pieces], held.flush()] == released
    assert held.stopped is stopped
