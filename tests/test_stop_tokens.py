"""A stop string that names a special token stops at the token, which has no text in the answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_model import MarkovModel, scripted
from tiny_tokenizers import PRE, tiny_bpe
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Library
from tokenizers.decoders import Fuse

from realizar_torch.checkpoint.tokenizer_json import JsonTokenizer
from realizar_torch.errors import FormatError
from realizar_torch.generation.batch_request import BatchRequest
from realizar_torch.generation.loop import generate_ids
from realizar_torch.generation.stopping import RowStop, StopStrings
from realizar_torch.generation.text import stream

START, END, TURN, LONGER = "<|go|>", "<|done|>", "<turn>", "<|done|>!"
SPECIAL = (START, END, TURN, LONGER)


def gguf() -> Any:
    tokens, kinds = (PRE["metadata"][f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    return tiny_bpe(tokens=[*tokens, *SPECIAL], token_type=[*kinds, *[3] * len(SPECIAL)])


def tokenizer_json() -> JsonTokenizer:
    letters = "".join(map(chr, range(32, 127))) + "\n"
    library = Library(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    library.decoder = Fuse()
    library.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return JsonTokenizer(library.to_str(), {})


KINDS = [pytest.param(gguf, id="gguf"), pytest.param(tokenizer_json, id="tokenizer.json")]
# what the model says, as tokens; stop strings; the answer, how much of it is said, and whether it was stopped
CASES = [
    pytest.param(["ab", END, "cd"], [END], "ab", 2, True, id="a token"),
    pytest.param(["ab", END, "cd"], ["x", START], "abcd", 3, False, id="another token"),
    pytest.param(["ab", START, "user", "x"], [f"b{START}user"], "a", 3, True, id="a token within"),
    pytest.param(["a", END, "\n", START, "us"], [f"{END}\n{START}"], "a", 4, True, id="two tokens"),
    pytest.param(["a", END, "\n", END, "us"], [f"{END}\n{START}"], "a\nus", 5, False, id="one of two"),
    pytest.param(["a<|do", "ne|>b"], [END], "a", 2, True, id="spelled"),
    pytest.param(["ab", TURN, "cd"], ["turn", "<", "bc"], "a", 3, True, id="parts of its text are no text"),
    pytest.param(["ab", LONGER, "cd"], [LONGER], "ab", 2, True, id="the longer of two"),
    pytest.param(["ab", TURN, END], ["b", END], "a", 1, True, id="others stop as ever"),
    pytest.param(["ab", START], [f"{START}user"], "ab", 2, False, id="held to the end"),
]


def ids_of(tokenizer: Any, parts: list[str]) -> list[list[int]]:
    """Ids of each part: one for a special token."""
    special = tokenizer.special_tokens_in("".join(SPECIAL))
    return [[special[part]] if part in SPECIAL else tokenizer.encode(part) for part in parts]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("parts", "stops", "text", "count", "stopped"), CASES)
def test_an_answer_stops_at_the_token(
    make: Callable, parts: list, stops: list, text: str, count: int, stopped: bool
) -> None:
    tokenizer = make()
    row = RowStop((), StopStrings.of(stops, tokenizer), tokenizer.detokenizer())
    told, released, taken = ids_of(tokenizer, parts), "", 0
    while row.reason is None and taken < len(told):
        # a row that has ended takes tokens without a word
        released += "".join(map(row.push, told[taken]))
        taken += 1
    assert taken == count and row.reason == ("stop_string" if stopped else None)
    assert released + ("" if stopped else row.end("length")) == text


@pytest.mark.parametrize("make", KINDS)
def test_every_way_to_generate_does(make: Callable, monkeypatch) -> None:
    tokenizer = make()
    prompt, (answer,), (end,), (rest,) = ids_of(tokenizer, ["x", "a", END, "b"])
    model = follower(monkeypatch, tokenizer, [prompt[-1], answer, end, rest, rest])
    options: Any = {"max_new_tokens": 4, "stop_strings": [f"a{END}"], "eos_token_id": []}

    streamed = stream(model, tokenizer, "x", **options)
    assert ("".join(streamed), streamed.stop_reason, streamed.token_ids) == ("", "stop_string", [answer, end])
    ids = generate_ids(model, torch.tensor([prompt]), tokenizer=tokenizer, **options)
    assert ids.tolist() == [[*prompt, answer, end]]
    request = BatchRequest(0, model, "x", 64, tokenizer, dict(options))
    for token in (answer, end):
        assert not request.ended
        request.push(token)
    assert request.completion.reason == "stop_string" and request.completion.text == ""
    request.replay()
    assert request.completion.text == ""

    options["stop_strings"] = END
    assert list(stream(model, tokenizer, "x", **options)) == ["a"]
    # the last token that may end the answer in either way
    options["eos_token_id"] = [end]
    streamed = stream(model, tokenizer, "x", **(options | {"stop_strings": f"a{END}"}))
    assert list(streamed) == [] and streamed.token_ids == [answer, end]


def test_a_stop_string_that_is_no_text_is_refused() -> None:
    """It could not be found, but for that of a token."""
    with pytest.raises(FormatError, match=r"lone surrogate U\+D800 at 1"):
        StopStrings.of([END, "x\ud800\udc00"], gguf())


def follower(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, script: list[int]) -> MarkovModel:
    model = scripted(monkeypatch)
    model.config.vocab_size = tokenizer.vocab_size
    model.table = torch.zeros(tokenizer.vocab_size, tokenizer.vocab_size)
    model.follow(script)
    return model
