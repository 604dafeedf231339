"""Text in, text out on a scripted model: streaming, stop strings across tokens, held-back text."""

import re

import pytest
import torch
from scripted_model import EOS, PAD, VOCAB, Letters, MarkovModel, scripted
from tiny_tokenizers import tiny_spm

from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.generation.batch import BatchedGenerator
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.stopping import HeldText
from realizar_torch.generation.text import generate, stream


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> MarkovModel:
    return scripted(monkeypatch)


def test_text_is_the_answer_without_prompt_and_stop_token(model):
    model.follow([*Letters().encode("xhello"), EOS])
    # "l" follows "l": the scripted model would never leave it
    model.table[14, 14], model.table[14, 17] = 0.0, 60.0
    assert generate(model, Letters(), "x", max_new_tokens=20) == "helo"
    messages = [{"role": "user", "content": "wx"}]
    assert generate(model, Letters(), messages, max_new_tokens=20) == "helo"
    assert generate(model, Letters(), "x", max_new_tokens=2) == "he"


def test_stream_tells_ids_reason_and_metrics(model):
    model.follow([*Letters().encode("xabc"), EOS])
    answer = stream(model, Letters(), "wx", max_new_tokens=20)
    assert answer.stop_reason is None
    assert list(answer) == ["a", "b", "c"]
    assert answer.token_ids == [3, 4, 5, EOS]
    assert answer.stop_reason == "eos"
    metrics = answer.metrics
    assert (metrics.prompt_tokens, metrics.new_tokens, metrics.rows) == (2, 4, 1)
    assert 0 < metrics.first_token <= metrics.last_token
    assert metrics.tokens_per_second == 3 / (metrics.last_token - metrics.first_token)


def test_stream_raises_at_the_call_and_leaves_grad_mode_alone(model):
    with pytest.raises(CacheFullError):
        stream(model, Letters(), "x", max_new_tokens=64)
    for prompt_without_tokens in ("", [], 5, ["a", "b"]):
        with pytest.raises(FormatError):
            stream(model, Letters(), prompt_without_tokens, max_new_tokens=1)
    for _ in stream(model, Letters(), "x", max_new_tokens=3):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("ids", [EOS, [EOS], {EOS}, None, "1", ("1",), (1.0,), (True,)])
def test_stop_ids_of_a_model_that_are_no_tuple_of_ints_are_refused_before_any_step(model, ids):
    model.eos_token_ids = ids
    message = re.escape(f"model.eos_token_ids is {ids!r}; expected a tuple of ints")
    for prompt in ("x", [{"role": "user", "content": "x"}]):
        with pytest.raises(FormatError, match=message):
            generate(model, Letters(), prompt, max_new_tokens=4)
    with pytest.raises(FormatError, match=message):
        generate_ids(model, torch.tensor([[3]]), max_new_tokens=4)
    with pytest.raises(FormatError, match=message):
        BatchedGenerator(model)
    assert model.prefills == 0


def test_an_answer_to_messages_ends_where_the_template_ends_it(model):
    class Tokenizer(Letters):
        turn_end_ids = (5,)

    model.follow(Letters().encode("xabcd"))
    messages = [{"role": "user", "content": "x"}]
    assert generate(model, Tokenizer(), messages, max_new_tokens=4) == "ab"
    assert generate(model, Tokenizer(), "x", max_new_tokens=4) == "abcd"
    assert generate(model, Tokenizer(), messages, max_new_tokens=4, eos_token_id=[]) == "abcd"
    # a token that the model cannot give
    Tokenizer.turn_end_ids = (VOCAB,)
    assert generate(model, Tokenizer(), messages, max_new_tokens=4) == "abcd"
    model.follow([4, EOS])
    model.table[4, EOS] = 60.0
    assert generate(model, Tokenizer(), messages, max_new_tokens=4) == "ab"


@pytest.mark.parametrize("function", [generate, stream])
def test_wrong_keywords_are_reported_by_the_name_that_was_called(model, function):
    for options, message in (
        ({"max_new_tokens": 1, "max_tokens": 1}, "unexpected keyword argument 'max_tokens'"),
        ({"max_new_tokens": 1, "streamer": None}, "unexpected keyword argument 'streamer'"),
        ({"attention_mask": None}, "unexpected keyword argument 'attention_mask'"),
        ({}, "missing 1 required keyword-only argument: 'max_new_tokens'"),
    ):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) .*{message}"):
            function(model, Letters(), "x", **options)
        if "streamer" not in options and "attention_mask" not in options:
            with pytest.raises(TypeError, match=rf"^generate\(\) .*{message}"):
                generate_ids(model, torch.tensor([[3]]), **options)


def test_stop_string_across_tokens_cuts_the_text_and_keeps_the_ids(model):
    model.follow(Letters().encode("xabcdefg"))
    answer = stream(model, Letters(), "x", max_new_tokens=7, stop_strings=["cde", "zz"])
    assert list(answer) == ["a", "b"]
    assert answer.token_ids == Letters().encode("abcde")
    assert answer.stop_reason == "stop_string"
    ids = generate_ids(
        model,
        torch.tensor([Letters().encode("xabc")]),
        max_new_tokens=7,
        stop_strings="de",
        tokenizer=Letters(),
    )
    assert ids.tolist() == [Letters().encode("xabcde")]


def test_held_back_text_and_half_characters_come_at_the_end(model):
    model.follow(Letters().encode("xabcd"))
    answer = stream(model, Letters(), "x", max_new_tokens=3, stop_strings=["cdef"])
    assert list(answer) == ["a", "b", "c"]
    assert answer.stop_reason == "length"
    model.follow([4, 29, 28, 29])
    # stronger than what the first script has taught "b" and the second "é"
    model.table[4, 29] = model.table[28, 29] = 60.0
    answer = stream(model, Letters(), "b", max_new_tokens=3)
    assert list(answer) == ["é", "\N{REPLACEMENT CHARACTER}"]


def test_one_row_stops_at_its_string_while_the_other_goes_on(model):
    model.follow(Letters().encode("abcdefgh"))
    model.follow(Letters().encode("npqrstuv"))
    ids = generate_ids(
        model,
        torch.tensor([[3], [16]]),
        max_new_tokens=4,
        stop_strings=["bc"],
        tokenizer=Letters(),
        eos_token_id=[],
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
        (["y", "ab"], ["xabcy"], ["x", ""], True),
    ],
)
def test_held_text_releases_all_that_is_certain(stops, pieces, released, stopped):
    held = HeldText(stops)
    assert [*[held.push(piece) for piece in pieces], held.flush()] == released
    assert held.stopped is stopped


def test_a_first_word_keeps_the_space_that_parts_it_from_the_prompt(monkeypatch):
    """SentencePiece drops the space at the start of a text; a continued text does not start there."""
    tokenizer = tiny_spm(add_space_prefix=True, add_bos_token=False)
    tokens = tokenizer.vocabulary.tokens
    word = next(i for i, token in enumerate(tokens) if token.startswith("\u2581") and len(token) > 1)
    model = scripted(monkeypatch)
    model.config.vocab_size = len(tokens)
    model.table = torch.zeros(len(tokens), len(tokens))
    model.table[:, word] = 1.0
    text = tokens[word].replace("\u2581", " ")
    assert generate(model, tokenizer, "a", max_new_tokens=2) == text + text
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: tokenizer.encode("a"))
    answer = generate(model, tokenizer, [{"role": "user", "content": "a"}], max_new_tokens=2)
    assert answer == text.removeprefix(" ") + text
