"""PrefixCache: what is kept between generations, and that keeping it changes no result."""

import gc
from types import SimpleNamespace

import pytest
import torch
from random_models import CONTEXT, WINDOW, write_random_model
from scripted_model import EOS, MarkovModel
from test_decode_ahead import put_table_in_place_of_the_step
from tiny_models import write_tiny_llama

import realizar_torch as rt
from realizar_torch.errors import FormatError
from realizar_torch.generation import graph, loop, prefix
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.nn.kv_cache import KVCache

# fp32 on both sides, logits of size 10 from sums of up to 512 terms in other orders (as in test_cpu_step.py)
TOLERANCE = 2e-4


def tokens(count, seed):
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


HEAD, OLD_TAIL, TAIL, ANSWER = tokens(40, 1), tokens(9, 2), tokens(7, 3), tokens(6, 4)


def load(path, **options):
    return rt.load(path, device="cpu", **{"activations": "float"} | options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", seed=3)


@pytest.fixture(scope="module")
def tiny(path):
    return load(path)


@pytest.fixture
def model(tiny):
    return tiny[0]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model whose local layers see 16 positions, fewer than any prefix here is long."""
    assert len(HEAD) > 2 * WINDOW and len(HEAD + OLD_TAIL + ANSWER) < CONTEXT
    return load(write_random_model(tmp_path_factory.mktemp("w") / "m.gguf", "gemma3", fmt="Q8_0"))[0]


def run(model, prompt, answer, cache):
    """Logits [1 + len(answer), V] behind the prompt and each token of the answer, by way of ``cache``."""
    with cache.resumed(prompt, model.max_seq_len) as state, torch.inference_mode():
        logits = [prefill(model, torch.tensor([prompt[state.cache.length :]]), None, state).clone()]
        for token in answer:
            cache.append(token)
            logits.append(decode_step(model, torch.tensor([token]), state).clone())
    return torch.cat(logits)


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize("name", ["tiny", "windowed"])
def test_logits_behind_a_kept_prefix_are_those_of_the_whole_prompt(name, request):
    model = request.getfixturevalue(name)
    model = model[0] if isinstance(model, tuple) else model
    cache = rt.PrefixCache(model)
    run(model, HEAD + OLD_TAIL, ANSWER, cache)
    assert cache.token_ids == (*HEAD, *OLD_TAIL, *ANSWER)
    # the prompt leaves the old sequence in its middle, and then goes on behind its own answer
    for prompt in (HEAD + TAIL, HEAD + TAIL + ANSWER + TAIL):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + ANSWER]), logits_to_keep=len(ANSWER) + 1).logits[0]
        assert (run(model, prompt, ANSWER, cache) - expected).abs().max() <= TOLERANCE
        assert cache.token_ids == (*prompt, *ANSWER)


def test_int8_logits_behind_a_kept_prefix_are_as_near_to_the_exact_ones(path, model):
    rounded = load(path, activations="int8")[0]
    cache = rt.PrefixCache(rounded)
    run(rounded, HEAD + OLD_TAIL, ANSWER, cache)
    kept = run(rounded, HEAD + TAIL, ANSWER, cache)
    fresh = run(rounded, HEAD + TAIL, ANSWER, rt.PrefixCache(rounded))
    exact = run(model, HEAD + TAIL, ANSWER, rt.PrefixCache(model))
    assert 0 < rms(kept - exact) <= 1.2 * rms(fresh - exact)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_the_same_pieces_give_the_same_bits(path, activations):
    """Nothing of the old sequence is left behind the prefix: its keys and values may be NaN there."""
    model = load(path, activations=activations)[0]
    cache = rt.PrefixCache(model)
    run(model, HEAD + OLD_TAIL, ANSWER, cache)
    for memory in (cache._state.cache.keys, cache._state.cache.values):
        memory[:, :, :, len(HEAD) :] = torch.nan
    kept = run(model, HEAD + TAIL, ANSWER, cache)

    state = new_state(model, 1, model.max_seq_len)
    with torch.inference_mode():
        prefill(model, torch.tensor([HEAD + OLD_TAIL]), None, state)
        state.cache.rollback(len(HEAD))
        logits = [prefill(model, torch.tensor([TAIL]), None, state).clone()]
        logits += [decode_step(model, torch.tensor([token]), state).clone() for token in ANSWER]
    assert torch.equal(kept, torch.cat(logits))


def test_generate_gives_the_same_ids_and_counts_what_it_reused(tiny):
    model, tokenizer = tiny
    cache = rt.PrefixCache(model)
    messages, reused = [], []
    for question in ("Who?", "And then, which of the others?", "Why?"):
        messages.append({"role": "user", "content": question})
        options = {"max_new_tokens": 8, "eos_token_id": []}
        prompt = len(tokenizer.apply_chat_template(messages))
        answer = rt.stream(model, tokenizer, messages, prefix_cache=cache, **options)
        text = "".join(answer)
        assert answer.token_ids == list(ids_of(rt.stream(model, tokenizer, messages, **options)))
        reused.append(answer.metrics.reused_tokens)
        assert answer.metrics.prompt_tokens == prompt
        assert len(cache.token_ids) == prompt + 7
        messages.append({"role": "assistant", "content": text})
    assert reused[0] == 0 < reused[1] < reused[2]
    # the same prompt again: all but its last token
    answer = rt.stream(model, tokenizer, messages[:-1], prefix_cache=cache, **options)
    assert "".join(answer) == messages[-1]["content"]
    assert answer.metrics.reused_tokens == prompt - 1
    ids = torch.tensor([tokenizer.apply_chat_template(messages[:1])])
    assert torch.equal(model.generate(ids, prefix_cache=cache, **options), model.generate(ids, **options))


def ids_of(stream):
    list(stream)
    return stream.token_ids


def test_sampling_and_the_penalty_see_the_whole_prompt(model):
    options = {"max_new_tokens": 9, "do_sample": True, "repetition_penalty": 1.4, "eos_token_id": []}
    cache = rt.PrefixCache(model)
    model.generate(torch.tensor([HEAD]), max_new_tokens=1, prefix_cache=cache)
    found, expected = (
        model.generate(
            torch.tensor([HEAD + TAIL]), generator=torch.Generator().manual_seed(1), prefix_cache=c, **options
        )
        for c in (cache, None)
    )
    assert torch.equal(found, expected)


def kept_keys_are_right(model, cache):
    """The keys of ``cache`` are those of its ids, computed at once."""
    ids = torch.tensor([cache.token_ids], device=model.device)
    fresh = KVCache(model.config, 1, ids.shape[1], device=model.device)
    with torch.inference_mode():
        model(ids, cache=fresh)
    kept = cache._state.cache
    assert kept.length == ids.shape[1]
    assert (kept.keys[:, :, :, : kept.length] - fresh.keys).abs().max() <= TOLERANCE


def test_a_closed_stream_a_stop_and_an_error_leave_a_right_cache(tiny, monkeypatch):
    model, tokenizer = tiny
    cache = rt.PrefixCache(model)
    options = {"prefix_cache": cache, "eos_token_id": []}
    stream = rt.stream(model, tokenizer, "the cat and the dog", max_new_tokens=9, **options)
    next(stream), next(stream)
    stream.close()
    prompt = tokenizer.encode("the cat and the dog")
    assert cache.token_ids == (*prompt, *stream.token_ids[:-1])
    kept_keys_are_right(model, cache)

    model.generate(torch.tensor([HEAD]), max_new_tokens=9, prefix_cache=cache, eos_token_id=range(250))
    assert cache.token_ids == tuple(HEAD)
    kept_keys_are_right(model, cache)

    append = KVCache.append

    def interrupted(self, layer, key, value):
        if layer == 1:
            raise KeyboardInterrupt
        return append(self, layer, key, value)

    monkeypatch.setattr(KVCache, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.tensor([HEAD[:20] + TAIL]), max_new_tokens=9, **options)
    monkeypatch.undo()
    assert cache.token_ids == tuple(HEAD[:20])
    kept_keys_are_right(model, cache)
    list(rt.stream(model, tokenizer, "the", max_new_tokens=2, **options))


def test_memory_is_kept_and_freed(model):
    cache = rt.PrefixCache(model)
    assert cache.memory_bytes == 0 and cache.token_ids == ()
    run(model, HEAD, ANSWER, cache)
    address = cache._state.cache.keys.data_ptr()
    assert cache.memory_bytes == KVCache(model.config, 1, model.max_seq_len).memory_bytes
    run(model, TAIL, ANSWER, cache)
    assert cache._state.cache.keys.data_ptr() == address
    cache.reset()
    assert cache.memory_bytes == 0 and cache.token_ids == ()


def test_a_changed_model_starts_anew(path):
    model = load(path)[0]
    ids, options = torch.tensor([HEAD]), {"max_new_tokens": 5, "eos_token_id": []}
    cache = rt.PrefixCache(model)
    before = model.generate(ids, prefix_cache=cache, **options)
    with torch.no_grad():
        model.layers[0].attn_norm.weight.mul_(-1.5)
    changed = model.generate(ids, prefix_cache=cache, **options)
    assert torch.equal(changed, model.generate(ids, **options)) and not torch.equal(changed, before)
    model.to(torch.float64)
    with pytest.warns(UserWarning, match="module by module"):
        model.generate(ids, prefix_cache=cache, **options)
    assert cache._state.cache.keys.dtype == torch.float64


def test_a_larger_request_gets_a_larger_cache(path):
    model = load(path, max_seq_len=50)[0]
    cache = rt.PrefixCache(model)
    model.generate(torch.tensor([HEAD]), max_new_tokens=10, prefix_cache=cache)
    model.max_seq_len = 60
    model.generate(torch.tensor([HEAD]), max_new_tokens=20, prefix_cache=cache, eos_token_id=[])
    assert len(cache.token_ids) == 59


def test_what_it_cannot_hold_is_refused(path, tiny):
    model, tokenizer = tiny
    cache = rt.PrefixCache(model)
    ids = torch.tensor([HEAD, HEAD])
    padded = torch.ones(1, len(HEAD))
    padded[0, 0] = 0
    for arguments in ((ids,), (ids[:1], padded)):
        with pytest.raises(FormatError, match="one sequence without padding"):
            model.generate(*arguments, max_new_tokens=1, prefix_cache=cache)
    with pytest.raises(FormatError, match="another model"):
        load(path)[0].generate(ids[:1], max_new_tokens=1, prefix_cache=cache)
    with pytest.raises(FormatError, match="expected a PrefixCache"):
        model.generate(ids[:1], max_new_tokens=1, prefix_cache={})
    first = rt.stream(model, tokenizer, "the", max_new_tokens=4, prefix_cache=cache, eos_token_id=[])
    next(first)
    for use in (lambda: run(model, HEAD, [], cache), cache.reset):
        with pytest.raises(FormatError, match="in use by a generation"):
            use()
    first.close()
    run(model, HEAD, [], cache)


def test_a_step_too_many_is_forgotten(monkeypatch):
    """On a GPU a step runs ahead; here a table stands in for it (test_decode_ahead.py)."""
    put_table_in_place_of_the_step(monkeypatch)
    model = MarkovModel()
    model.follow([5, 7, 8, EOS])
    model.parameters, model.buffers = list, list
    fed = []

    def make_state(model, batch_size, max_positions, pooled):
        assert not pooled
        cache = KVCache(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1), batch_size, max_positions)
        decoder = graph.DecodeGraph(model, batch_size, cache=cache, workspace=object())
        return SimpleNamespace(cache=cache, decoder=decoder, close=decoder.finish)

    def feed(model, input_ids, attention_mask, state, *, cuda_graph):
        fed.append(input_ids.tolist())
        state.cache.advance(input_ids.shape[1])
        return model.table[input_ids[:, -1]]

    monkeypatch.setattr(prefix, "new_state", make_state)
    monkeypatch.setattr(loop, "prefill", feed)
    cache = prefix.PrefixCache(model)
    options = {"max_new_tokens": 12, "prefix_cache": cache, "cuda_graph": False}
    assert loop.generate_ids(model, torch.tensor([[9, 5]]), **options).tolist() == [[9, 5, 7, 8, EOS]]
    # the step that EOS was fed to has run: its keys and values are right ones
    assert cache.token_ids == (9, 5, 7, 8, EOS) and cache._state.cache.length == 5
    stream = iter(loop.Decoding(model, loop.make_request(model, torch.tensor([[9, 5, 7, 6, 5]]), **options)))
    next(stream), next(stream)
    stream.close()
    assert fed == [[[9, 5]], [[6, 5]]]
    assert cache.token_ids == (9, 5, 7, 6, 5, 7, 8) and cache._state.cache.length == 7

    def interrupted():
        raise KeyboardInterrupt

    # a step has been issued whose token nobody has read
    monkeypatch.setattr(cache._state.decoder, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.generate_ids(model, torch.tensor([[9, 5, 7, 6]]), **options)
    assert cache.token_ids == (9, 5, 7, 6) and cache._state.cache.length == 4


@pytest.mark.gpu
def test_on_a_gpu_graph_and_memory_stay(tmp_path):
    # packed throughout: graphs know no dense linears
    path = write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0")
    model, tokenizer = rt.load(path, device="cuda", dtype=torch.float32, activations="float")
    cache = rt.PrefixCache(model)
    options = {"max_new_tokens": 12, "eos_token_id": []}
    ids = torch.tensor([HEAD + OLD_TAIL])
    model.generate(ids, prefix_cache=cache, cuda_graph=True, **options)
    decoder, address = cache._state.decoder, cache._state.cache.keys.data_ptr()
    for prompt in (HEAD + TAIL, HEAD + TAIL + ANSWER, HEAD[:9] + TAIL):
        ids = torch.tensor([prompt])
        found = model.generate(ids, prefix_cache=cache, cuda_graph=True, **options)
        assert torch.equal(found, model.generate(ids, **options))
        assert cache.token_ids == tuple(found[0, :-1].tolist())
        kept_keys_are_right(model, cache)
        stream = rt.stream(model, tokenizer, "the cat and the dog", prefix_cache=cache, **options)
        next(stream), next(stream)
        stream.close()
        kept_keys_are_right(model, cache)
    assert cache._state.decoder is decoder and decoder.stats.captures == 1
    assert cache._state.cache.keys.data_ptr() == address


def test_a_loop_that_is_left_early_leaves_the_cache_free_at_once(tiny):
    model, tokenizer = tiny
    cache = prefix.PrefixCache(model)
    gc.disable()
    try:
        for _ in rt.stream(model, tokenizer, "one two three", max_new_tokens=30, prefix_cache=cache):
            break
        cache.reset()
    finally:
        gc.enable()


def test_a_closed_stream_leaves_the_cache_free_where_python_keeps_its_loop(tiny, monkeypatch):
    """In Python 3.12.3 a closed generator keeps the one it was reading: python/cpython#118272."""
    model, tokenizer = tiny
    cache = prefix.PrefixCache(model)
    kept, loop_of = [], loop.Decoding.__iter__
    monkeypatch.setattr(loop.Decoding, "__iter__", lambda self: kept.append(loop_of(self)) or kept[-1])
    stream = rt.stream(model, tokenizer, "one two three", max_new_tokens=30, prefix_cache=cache)
    next(stream)
    stream.close()
    assert len(kept) == 1
    cache.reset()
