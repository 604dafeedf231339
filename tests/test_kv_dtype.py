"""KV caches of 8 bits through the product: errors within their bounds, and every path sees the same rows."""

import json
from types import SimpleNamespace

import pytest
import random_models
import torch
from command_line import call
from random_models import write_random_model

import realizar_torch as rt
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.generation.step_bytes import decode_bytes
from realizar_torch.nn import attention
from realizar_torch.nn.cache_rows import LARGEST, dequantize_rows, quantize_rows
from realizar_torch.nn.kv_cache import KVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# fp32 on both sides, logits of size 10 from sums in other orders; a query of fp16 on a GPU
TOLERANCE = 2e-4 if DEVICE.type == "cpu" else 2e-2
LENGTH, STEPS = 1100, 8
CONFIG = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=16)

pytestmark = pytest.mark.filterwarnings("ignore:decoding runs module by module")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A llama of two layers and heads of 24 for texts of 1,200 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"LAYERS": 2, "CONTEXT": 1200, "HEADS": 4, "KV_HEADS": 2}.items():
            patch.setattr(random_models, name, size)
        return write_random_model(tmp_path_factory.mktemp("kv") / "m.gguf", "llama", fmt="Q8_0", tied=False)


def load(path, kind=None, **options):
    options = {"dtype": "float32", "activations": "float", "device": DEVICE} | options
    return rt.load(path, kv_dtype=kind, **options)[0]


def ids_of(rows, count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (rows, count), generator=generator).to(DEVICE)


def decoded(model, ids, steps, mask=None):
    """Logits [B, steps, V] of the last tokens, fed one by one."""
    with torch.inference_mode():
        state, past = new_state(model, len(ids), ids.shape[1]), ids.shape[1] - steps
        found = [prefill(model, ids[:, :past], mask, state).clone()]
        for step in range(past, ids.shape[1] - 1):
            found.append(decode_step(model, ids[:, step], state).clone())
        state.close()
    return torch.stack(found, 1)


def with_rows(monkeypatch, change):
    """Attention without a cache sees keys and values through ``change``."""
    plain = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, *rest: plain(q, change(k), change(v), *rest))


def rms(x):
    return float(x.double().square().mean().sqrt())


def hard_rows():
    """Rows of all magnitudes, of zeros, with one huge element, of tiny ones."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(300, 24, generator=generator) * 10.0 ** torch.linspace(-30, 30, 300)[:, None]
    rows[7] = 0
    rows[8, 3] = 1e30
    rows[9, ::2] = 0
    rows[10] = 3e38
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_an_element_is_off_by_half_a_step_at_most(kind):
    rows = hard_rows()
    elements, scales = quantize_rows(rows, KINDS[kind])
    error = (dequantize_rows(elements, scales, torch.float64) - rows.double()).abs()
    largest = rows.double().abs().amax(-1, keepdim=True)
    if kind == "int8":
        bound = (largest / 254).expand_as(error)
    else:
        # three bits behind the leading one; below 2^-6 steps of 2^-9
        bound = torch.maximum(rows.double().abs() / 16, largest / 448 / 1024)
    # the scale, its inverse and the quotient are rounded to fp32: 2^-22 of 127 steps or 448
    assert (error <= bound * (1 + 2.0**-14)).all()
    # and not by nothing: the bound is the least one
    assert (error > 0.9 * bound)[11:].any()
    assert (elements.float()[7] == 0).all() and scales[7] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_in_its_row(kind):
    rows = hard_rows()
    clean = dequantize_rows(*quantize_rows(rows, KINDS[kind]), torch.float32)
    rows[3, 5], rows[4, 6] = torch.nan, -torch.inf
    found = dequantize_rows(*quantize_rows(rows, KINDS[kind]), torch.float32)
    others = [row for row in range(len(rows)) if row not in (3, 4)]
    assert found[[3, 4]].isnan().all() and torch.equal(found[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_8_bits_appends_rolls_back_and_grows(kind):
    cache, exact = KVCache(CONFIG, 3, 9, dtype=KINDS[kind]), KVCache(CONFIG, 3, 9)
    # a byte per element, and four per row
    assert cache.memory_bytes == 2 * 2 * 3 * 2 * 9 * (16 + 4) and exact.memory_bytes == 2 * 2 * 3 * 2 * 9 * 64
    key, value = torch.randn(2, 3, 2, 5, 16)
    for layer in (0, 1):
        found = cache.append(layer, key, value)
        for mine, rows in zip(found, (key, value), strict=True):
            assert torch.equal(mine, dequantize_rows(*quantize_rows(rows, KINDS[kind]), torch.float32))
    cache.advance(5)
    # what lies behind must not matter
    cache.scales[..., 5:] = torch.nan
    cache.rollback(3)
    again = cache.append(0, key[:, :, :1], value[:, :, :1])
    assert torch.equal(again[0][:, :, :3], found[0][:, :, :3])
    assert torch.equal(again[0][:, :, 3], found[0][:, :, 0]) and torch.equal(
        again[1][:, :, 3], found[1][:, :, 0]
    )

    row = cache.row(1, 4)
    row.append(1, 7 * key[:1, :, :1], value[:1, :, :1])
    assert torch.equal(cache.scales[0, 1, 1, :, 4], quantize_rows(7 * key[0, :, 0], KINDS[kind])[1])
    cache.reset(zero=True)
    assert not cache.scales.any() and cache.length == 0
    assert cache.ensure(4, 9) and cache.scales.shape == (2, 2, 4, 2, 9)
    assert not cache.ensure(1, 2) and cache.scales.shape == (2, 2, 1, 2, 9)


def test_elements_and_scales_go_together():
    keys = torch.zeros(1, 1, 1, 4, 8, dtype=torch.int8)
    with pytest.raises(rt.FormatError, match="int8 without scales"):
        KVCache.over(keys, keys, 0)
    with pytest.raises(rt.FormatError, match=r"a cache of torch\.int16; expected one of .*torch\.int8"):
        KVCache(CONFIG, 1, 4, dtype=torch.int16)


def noisy(kind):
    """Uniform noise of the steps' size in place of rounding."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def change(rows):
        step = rows.abs().amax(-1, keepdim=True) / LARGEST[KINDS[kind]]
        if kind == "fp8":
            step = step * torch.exp2((rows / step).abs().clamp_min(2.0**-6).log2().floor() - 3)
        return rows + step * (torch.rand(rows.shape, generator=generator, device=DEVICE) - 0.5)

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_past_a_thousand_tokens_sees_quantized_rows(path, monkeypatch, kind):
    """Against passes without a cache, whose keys and values are quantized row by row, or blurred as much."""
    ids, plain = ids_of(1, LENGTH), load(path)

    def logits(change):
        with_rows(monkeypatch, change)
        with torch.inference_mode():
            return plain(ids, logits_to_keep=STEPS + 1).logits[:, :-1]

    found = decoded(load(path, kind), ids, STEPS)
    exact = logits(lambda rows: rows)
    expected = logits(lambda rows: dequantize_rows(*quantize_rows(rows, KINDS[kind]), rows.dtype))
    error = rms(expected - exact)
    if DEVICE.type == "cpu":
        assert (found - expected).abs().max() <= TOLERANCE
    # queries of fp16, and a few elements that a last bit moves to their neighbours
    assert rms(found - expected) <= 0.1 * error
    # rounding is no worse than noise of its size
    assert 0 < error <= 1.5 * rms(logits(noisy(kind)) - exact)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_in_any_way_equals_one_prompt(path, kind):
    """Left padding, one row or several, in steps or at once, and again after a rollback."""
    model, ids = load(path, kind), ids_of(3, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    together = decoded(model, ids, 5, mask[:, :25])
    with torch.inference_mode():
        state = new_state(model, 3, 30)
        at_once = prefill(model, ids, mask, state)
        state.cache.rollback(29)
        again = decode_step(model, ids[:, 29], state).clone()
        state.close()
        assert near(at_once, again)
    for row, start in ((0, 9), (1, 0), (2, 0)):
        alone = decoded(model, ids[row : row + 1, start:], 5)
        assert near(alone[0], together[row])
    # and the last logits of the steps, one token further
    assert near(decoded(model, torch.cat([ids, ids[:, :1]], 1), 2, mask[:, :29])[:, 1][0], again[0])


def near(found, expected):
    """Equal but for rounding, and on a GPU for the few elements that it moves to their neighbours."""
    bound = TOLERANCE if DEVICE.type == "cpu" else 0.02 * rms(expected)
    return rms(found - expected) <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_what_unused_rows_hold_does_not_matter(path, kind):
    model, ids = load(path, kind), ids_of(1, 20)
    clean = decoded(model, ids, 4)
    with torch.inference_mode():
        state = new_state(model, 1, 20)
        state.cache.keys.view(torch.uint8).fill_(0x7F)
        state.cache.values.view(torch.uint8).fill_(0x7F)
        state.cache.scales.fill_(torch.nan)
        found = [prefill(model, ids[:, :16], None, state).clone()]
        found += [decode_step(model, ids[:, step], state).clone() for step in range(16, 19)]
        state.close()
    assert torch.equal(torch.stack(found, 1), clean)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_its_batches_and_prefixes(path, kind):
    model = load(path, kind)
    options = {"max_new_tokens": 6, "eos_token_id": []}
    prompts = [ids_of(1, count, count) for count in (3, 17, 40)]

    def batched(chosen):
        batch = rt.BatchedGenerator(model, max_batch=2)
        for prompt in chosen:
            batch.add(prompt[0], **options)
        return [list(done.token_ids) for done in sorted(batch, key=lambda done: done.id)]

    alone = [batched([prompt])[0] for prompt in prompts]
    assert batched(prompts) == alone and batched(prompts[::-1]) == alone[::-1]
    plain = [model.generate(prompt, **options)[0, prompt.shape[1] :].tolist() for prompt in prompts]
    kept = rt.PrefixCache(model)
    found = [model.generate(prompts[2], prefix_cache=kept, **options)[0, 40:].tolist() for _ in range(2)]
    assert found[0] == plain[2] and len(kept.token_ids) == 45
    # on a GPU one token is rounded by other kernels than a prompt
    assert DEVICE.type == "cuda" or (found[1] == plain[2] and plain == alone)
    cache = KVCache(model.config, 1, model.max_seq_len, device=DEVICE, dtype=KINDS[kind])
    assert kept.memory_bytes == cache.memory_bytes
    # another type from now on
    model.kv_dtype = None
    model.generate(prompts[2], prefix_cache=kept, **options)
    assert kept.memory_bytes == cache.memory_bytes * 96 / 28


def test_bytes_of_a_step_count_the_rows_as_they_are(path):
    wide, narrow = load(path, "bfloat16"), load(path, "fp8")
    seen = 7 * 10 + 7 * 8 // 2
    rows = 2 * wide.config.num_layers * wide.config.num_kv_heads * seen
    assert decode_bytes(wide, 1, 10, 7) - decode_bytes(narrow, 1, 10, 7) == rows * (2 * 24 - (24 + 4))


@pytest.mark.parametrize("name", ["fp8", "int8", torch.int8, "float8_e4m3fn", "float16", None])
def test_names_of_cache_types(path, name):
    model = load(path, name)
    expected = KINDS.get(name, {"float16": torch.float16, None: torch.float32}.get(name, name))
    expected = torch.float8_e4m3fn if name == "float8_e4m3fn" else expected
    assert model.cache_dtype == expected == model.new_cache(1, 4).dtype


@pytest.mark.parametrize("name", ["fp4", "q8_0", torch.uint8, 8])
def test_other_cache_types_are_refused(path, name):
    with pytest.raises(rt.FormatError, match=r"kv_dtype is .*expected None or one of .*int8.*fp8"):
        load(path, name)


def test_the_fused_cpu_step_leaves_8_bits_to_the_modules_and_says_so(path):
    model = rt.load(path, device="cpu", kv_dtype="int8")[0]
    with pytest.warns(UserWarning, match=r"module by module.*float32, with a cache of torch\.int8") as caught:
        model.generate(ids_of(1, 4).cpu(), max_new_tokens=3, eos_token_id=[])
    assert len(caught) == 1


def test_the_option_of_the_command_line(path, capsys):
    command = ("generate", "the cat", "-m", path, "--device", "cpu", "-n", 6, "--json", "--kv-dtype")
    code, out, _ = call(capsys, *command, "fp8")
    model, tokenizer = rt.load(path, device="cpu", kv_dtype="fp8")
    assert code == 0
    assert json.loads(out)["text"] == rt.generate(model, tokenizer, "the cat", max_new_tokens=6)
    with pytest.raises(SystemExit):
        call(capsys, *command, "fp4")
    assert "'fp8', 'int8'" in capsys.readouterr().err
