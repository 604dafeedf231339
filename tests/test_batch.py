"""BatchedGenerator: a request's tokens depend on nothing but itself; joins, leaves, stops, interrupts."""

import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from batch_jobs import add, job, load, run
from batch_soak import soak

import realizar_torch as rt
from realizar_torch.generation import batch as batch_module
from realizar_torch.generation import batch_request, batch_rows
from realizar_torch.generation.step import new_state

# fp32 on both sides; logits of size 10 from sums of up to 512 terms in other orders
TOLERANCE = 2e-4
# few sizes: a GPU compiles its kernels for each
BATCH = 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batch")


@pytest.fixture(scope="module")
def model(folder, device):
    return load(folder, device)


@pytest.fixture(scope="module")
def alone(model, device):
    """What each of 24 requests gives with no neighbour, in as many rows as everywhere."""
    return {number: run(model, [number], device, BATCH)[number] for number in range(24)}


@pytest.mark.parametrize("seed", range(3))
def test_slot_neighbours_and_order_change_nothing(model, device, alone, seed):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed)).tolist()
    assert run(model, order, device, BATCH) == alone
    assert len({tokens for tokens, _ in alone.values()}) > 15
    assert {reason for _, reason in alone.values()} == {"eos", "length"}


def test_joining_while_others_run_changes_nothing(model, device, alone):
    batch, numbers, found = rt.BatchedGenerator(model, max_batch=BATCH), {}, {}
    for number in range(24):
        numbers[add(batch, number, device)] = number
        for _ in range(number % 4):
            batch.step()
        found |= {numbers[done.id]: (done.token_ids, done.reason) for done in batch.collect()}
    found |= {numbers[done.id]: (done.token_ids, done.reason) for done in batch}
    assert found == alone and batch.pending == 0


def test_a_poisoned_neighbour_and_a_very_long_prompt_change_no_other_row(folder, device):
    model = load(folder, device)
    numbers = range(4, 12)
    expected = run(model, numbers, device, BATCH)
    # a token that no row chooses, whatever the CPU
    chosen = {token for tokens, _ in expected.values() for token in tokens}
    poison = max(set(range(5, 252)) - chosen)
    assert model.lm_head is not model.embed_tokens
    rt.unpack(model)
    weight = model.embed_tokens.weight
    # the scale of the first block: NaN in fp16
    weight[poison, :2] = torch.tensor([0, 126], dtype=torch.uint8, device=device)
    rt.prepack(model)
    batch, found = rt.BatchedGenerator(model, max_batch=BATCH), {}
    ids = {batch.add([5, poison, 9, 9], max_new_tokens=9): "poisoned"}
    ids[batch.add([7] * (batch.max_seq_len - 2), max_new_tokens=2, eos_token_id=[])] = "long"
    for number in numbers:
        ids[add(batch, number, device)] = number
        if number % 3 == 0:
            ids[batch.add([poison], max_new_tokens=9)] = "poisoned again"
    for done in batch:
        found[ids[done.id]] = done
    for name in ("poisoned", "poisoned again"):
        assert found[name].reason == "error" and found[name].token_ids == ()
        assert "NaN or infinite at step 0" in str(found[name].error)
    assert len(found["long"].token_ids) == 2
    assert {n: (found[n].token_ids, found[n].reason) for n in numbers} == expected


def test_thirty_two_prompts_alone_and_together(folder, device):
    """Greedy, by the margin rule: equal up to where the two best logits are too near to tell."""
    model = load(folder, device, "float")
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 250, (1 + 3 * i,), generator=generator).tolist() for i in range(32)]

    def tokens(max_batch):
        batch = rt.BatchedGenerator(model, max_batch=max_batch)
        for prompt in prompts:
            batch.add(prompt, max_new_tokens=24, eos_token_id=[])
        return {done.id: done.token_ids for done in batch}

    compared = 0
    together, one_by_one = tokens(32), tokens(1)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + list(together[i])], device=device)
        with torch.inference_mode():
            logits = model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
        top = logits.topk(2)
        for step in range(24):
            if float(top.values[step, 0] - top.values[step, 1]) <= 2 * TOLERANCE:
                break
            assert together[i][step] == one_by_one[i][step] == int(top.indices[step, 0])
            compared += 1
    assert compared > 0.8 * 32 * 24


def test_a_job_of_a_thousand_prompts_in_bounded_time(model, device):
    started = time.perf_counter()
    found = run(model, range(1000), device, 32, longest=16)
    assert len(found) == 1000
    sizes = {number: job(number, device, 16)[1]["max_new_tokens"] for number in found}
    for number, (tokens, reason) in found.items():
        assert len(tokens) == sizes[number] if reason == "length" else tokens[-1] in range(3, 250, 9)
    numbers = range(3, 1000, 97)
    assert run(model, numbers, device, 32, longest=16) == {number: found[number] for number in numbers}
    # a hang guard: it takes seconds
    assert time.perf_counter() - started < 200


def test_first_come_first_served(model):
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    for _ in range(11):
        batch.add([5, 6, 7], max_new_tokens=4, eos_token_id=[])
    assert [done.id for done in batch] == list(range(11))
    # long ones keep their rows, the others pass through the last one in their order
    for count in (40, 40, 40, 4, 4, 4, 4, 4):
        batch.add([6], max_new_tokens=count, eos_token_id=[])
    assert [done.id for done in batch] == [14, 15, 16, 17, 18, 11, 12, 13]


def test_requests_that_follow_a_completion_are_iterated_over(model):
    batch, counts = rt.BatchedGenerator(model, max_batch=BATCH), [2, 0, 3, 0, 0]
    batch.add([5], max_new_tokens=0)
    lengths = []
    for done in batch:
        lengths.append(len(done.token_ids))
        if counts:
            batch.add([5], max_new_tokens=counts.pop(0), eos_token_id=[])
    assert lengths == [0, 2, 0, 3, 0, 0]


def test_what_can_never_fit_is_refused_before_any_compute(model, monkeypatch):
    batch = rt.BatchedGenerator(model, max_batch=BATCH, max_seq_len=32)
    monkeypatch.setattr(batch_module, "rows_of", None)
    with pytest.raises(rt.CacheFullError, match=r"20 \+ 13 new tokens need 33 positions.*has 32"):
        batch.add([5] * 20, max_new_tokens=13)
    assert batch.pending == 0 and not batch.step()
    batch.add([5] * 20, max_new_tokens=0)
    assert [(done.token_ids, done.reason) for done in batch] == [((), "length")]


def test_the_whole_cache_is_usable(model):
    batch = rt.BatchedGenerator(model, max_batch=BATCH, max_seq_len=32)
    for length in (1, 19, 31):
        batch.add([5] * length, max_new_tokens=32 - length, eos_token_id=[])
    assert [len(done.token_ids) for done in sorted(batch, key=lambda done: done.id)] == [31, 13, 1]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, rt.FormatError, "at least one"),
        (b"text", {}, rt.FormatError, "a str"),
        ([5, 10**6], {}, rt.FormatError, "token 1000000"),
        ([[5, 6]], {}, rt.FormatError, "ids"),
        (7, {}, rt.FormatError, "ids"),
        ({5: 6}, {}, rt.FormatError, "ids"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), {}, rt.FormatError, "ids"),
        ("text", {}, rt.FormatError, "tokenizer="),
        ([{"role": "user", "content": "x"}], {}, rt.FormatError, "tokenizer="),
        (torch.zeros(1, 2, dtype=torch.int64), {}, rt.FormatError, "ids"),
        ([5], {"top_p": 2.0, "do_sample": True}, rt.FormatError, "top_p"),
        ([5], {"prefix_cache": None}, rt.FormatError, "prefix_cache"),
        ([5], {"cuda_graph": True}, rt.FormatError, "BatchedGenerator"),
        ([5], {"stop_strings": "x"}, rt.FormatError, "tokenizer"),
        ([5], {"max_length": 3}, TypeError, "add.*max_length"),
    ],
)
def test_impossible_requests_are_refused(model, prompt, options, error, message):
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    with pytest.raises(error, match=message):
        batch.add(prompt, **({"max_new_tokens": 3} | options))
    with pytest.raises(TypeError, match="max_new_tokens"):
        batch.add([5])
    assert batch.pending == 0


@pytest.mark.parametrize(
    "wrong",
    [{"max_batch": 0}, {"max_batch": 33}, {"max_batch": True}, {"max_seq_len": 129}, {"cuda_graph": 2}],
)
def test_impossible_batches_are_refused(model, wrong):
    with pytest.raises(rt.FormatError, match=next(iter(wrong))):
        rt.BatchedGenerator(model, **wrong)


def test_a_graph_that_cannot_be_had_is_refused_where_it_is_insisted_on(model, folder):
    on_cpu = load(folder, "cpu")
    with pytest.raises(rt.BackendUnavailableError, match="cuda_graph=True: no graph runs on cpu"):
        rt.BatchedGenerator(on_cpu, cuda_graph=True)
    state = new_state(model, 2, 16, pooled=False)
    with (
        torch.inference_mode(),
        hooked(model.layers[0].mlp),
        pytest.warns(UserWarning, match="has a forward hook"),
        pytest.raises(rt.BackendUnavailableError, match="module by module"),
    ):
        batch_rows.rows_of(model, state, True)


@contextmanager
def hooked(module):
    handle = module.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def test_steps_of_batches_are_dispatches(model):
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    batch.add([5], max_new_tokens=3, eos_token_id=[])
    steps = 0
    with rt.record_dispatch() as metrics:
        while batch.pending:
            steps += batch.step() or 1
    assert metrics.summary("decode_step").count == steps


def test_texts_and_messages_are_those_of_generate(folder, device):
    model = load(folder, device, "float")
    tokenizer = rt.load(folder / "batch.gguf", device="cpu")[1]
    prompts = ["and the cat", "is of", [{"role": "user", "content": "in a or"}]]
    batch = rt.BatchedGenerator(model, max_batch=1)
    options = {"max_new_tokens": 16, "do_sample": True, "top_k": 20, "eos_token_id": []}
    for i, prompt in enumerate(prompts):
        batch.add(prompt, tokenizer=tokenizer, generator=torch.Generator(device).manual_seed(i), **options)
    done = sorted(batch, key=lambda one: one.id)
    for i, prompt in enumerate(prompts):
        generator = torch.Generator(device).manual_seed(i)
        assert done[i].text == rt.generate(model, tokenizer, prompt, generator=generator, **options)
    text = done[0].text
    stop = text[len(text) // 2 :][:3]
    batch.add(
        prompts[0],
        tokenizer=tokenizer,
        stop_strings=stop,
        generator=torch.Generator(device).manual_seed(0),
        **options,
    )
    (stopped,) = batch
    assert (stopped.text, stopped.reason) == (text[: text.index(stop)], "stop_string")


def test_cancelled_requests_keep_what_they_have_and_disturb_nobody(model, device, alone):
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    ids = [batch.add([number], max_new_tokens=50, eos_token_id=[]) for number in (5, 6, 7, 8)]
    running, other, waiting = ids[0], ids[1], batch.add([7], max_new_tokens=50)
    for _ in range(6):
        batch.step()
    assert batch.cancel(running) and batch.cancel(waiting) and not batch.cancel(waiting)
    assert not batch.cancel(99)
    done = {one.id: one for one in batch.collect()}
    assert {one.reason for one in done.values()} == {"cancelled"}
    assert 4 <= len(done[running].token_ids) <= 6 and done[waiting].token_ids == ()
    number = add(batch, 3, device)
    found = {one.id: one for one in batch}
    assert found[number].token_ids == alone[3][0]
    expected = rt.BatchedGenerator(model, max_batch=BATCH)
    expected.add([6], max_new_tokens=50, eos_token_id=[])
    assert found[other].token_ids == next(iter(expected)).token_ids


def test_a_reset_forgets_everything(model, device, alone):
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    for number in range(8):
        add(batch, number, device)
    for _ in range(5):
        batch.step()
    batch.reset()
    assert batch.pending == 0 and batch.collect() == [] and not batch.step()
    ids = {add(batch, number, device): number for number in (9, 2, 17)}
    assert {ids[one.id]: (one.token_ids, one.reason) for one in batch} == {n: alone[n] for n in (2, 9, 17)}


def test_an_interrupt_at_any_line_loses_nothing(model, device, alone):
    """KeyboardInterrupt at every 7th line that a job runs in the scheduler, and go on: the same tokens."""
    files = {module.__file__ for module in (batch_module, batch_request, batch_rows)}
    countdown = 0

    def trace(frame, event, argument):
        nonlocal countdown
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return trace

    numbers, interrupts = [1, 5, 9, 12, 20, 21], 0
    for every in (7, 61, 400):
        batch, found = rt.BatchedGenerator(model, max_batch=BATCH), {}
        ids = {add(batch, number, device): number for number in numbers}
        while batch.pending:
            # further apart each time, or a long placement would never end
            every += 1
            countdown = every
            previous = sys.gettrace()
            sys.settrace(trace)
            try:
                batch.step()
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                sys.settrace(previous)
            for one in batch.collect():
                assert ids[one.id] not in found
                found[ids[one.id]] = (one.token_ids, one.reason)
        assert found == {number: alone[number] for number in numbers}
    assert interrupts > 50


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_model_that_changed_while_idle_is_noticed(folder, device, cancelled):
    model = load(folder, device)
    batch = rt.BatchedGenerator(model, max_batch=BATCH)
    add(batch, 2, device)
    (before,) = batch
    if cancelled:
        # idle without another step
        running = batch.add([5], max_new_tokens=9, eos_token_id=[])
        batch.step()
        assert batch.cancel(running) and len(batch.collect()) == 1
    layer = model.layers[0].mlp.down_proj
    rt.unpack(model)
    layer.weight = torch.nn.Parameter(layer.weight.roll(1, 0).contiguous(), requires_grad=False)
    rt.prepack(model)
    add(batch, 2, device)
    (after,) = batch
    assert after.token_ids == run(model, [2], device, BATCH)[2][0] != before.token_ids


def test_soak_of_random_joins_leaves_interrupts_resets_and_capacities(model, device):
    """The first steps of tests/batch_soak.py, which runs 10,000."""
    test = soak(model, device, 1200)
    assert test.compared > 150 and test.interrupts > 5 and test.resets > 0


def test_a_second_thread_is_refused_and_disturbs_nobody(model, device, alone):
    batch, found = rt.BatchedGenerator(model, max_batch=BATCH), []
    calls = [batch.step, batch.collect, batch.reset, lambda: batch.cancel(0), lambda: next(iter(batch))]
    calls.append(lambda: batch.add([5], max_new_tokens=1))

    def try_all() -> None:
        for call in calls:
            try:
                call()
            except rt.FormatError as error:
                found.append(str(error))

    class Prompt(list):
        def __iter__(self):
            thread = threading.Thread(target=try_all)
            thread.start()
            thread.join()
            return super().__iter__()

    prompt, options = job(3, device)
    batch.add(prompt, **options)
    batch.step()
    batch.add(Prompt([5, 6]), max_new_tokens=1)
    assert len(found) == len(calls) and all("another thread" in message for message in found)
    first = next(done for done in batch if done.id == 0)
    assert (first.token_ids, first.reason) == alone[3]
