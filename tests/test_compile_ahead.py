"""Kernels are compiled side by side before a prompt and a step launch the first of them."""

import pytest
from compiled_kernels import printed_by
from random_models import write_random_model

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ``kernels_ahead.py`` saw in a process of its own: here kernels are interpreted."""
    path = write_random_model(tmp_path_factory.mktemp("ahead") / "m.gguf", "llama", fmt="Q8_0", tied=False)
    return printed_by("kernels_ahead.py", str(path))


def test_every_kernel_of_prompt_and_step_is_asked_for_in_the_rehearsal(found):
    ahead, behind = found["first"]["ahead"], found["first"]["behind"]
    assert {what for what, _ in ahead} == {"compiled ahead", "loaded ahead"}
    assert {what for what, _ in behind} == {"launched"}
    assert {name for _, name in ahead} == {name for _, name in behind}
    # of the prompt, of the step, of the choice of a token
    assert {"_prompt_attention_kernel", "attention_kernel", "_highest_kernel"} <= {name for _, name in behind}


@pytest.mark.parametrize("run", ["first", "second"])
def test_a_rehearsal_leaves_rows_and_cache_as_they_are(found, run):
    """In the second run all kernels are there, and launched: at no position of the cache."""
    assert found[run]["kept"]
    assert found[run]["places"] == [[-1]]


def test_nothing_is_compiled_twice(found):
    events = found["second"]["ahead"] + found["second"]["behind"]
    assert {what for what, _ in events} == {"launched"}


def test_no_token_waits_for_dynamo(found):
    """It takes as long to import as all kernels take to load from Triton's cache."""
    assert not found["dynamo"]


def test_a_kernel_that_does_not_compile_is_an_error_where_it_is_launched(found):
    assert found["refused"] == "_gated_kernel does not compile"


def test_launches_take_place_after_a_rehearsal_that_was_cut_off(found):
    assert found["interrupted"] == [
        ["compiled in turn", "_gated_kernel"],
        ["loaded in turn", "_gated_kernel"],
        ["launched", "_gated_kernel"],
    ]
