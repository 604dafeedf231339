"""Generation in numbers: bytes that decoding reads, their rate and share of the bandwidth; never NaN."""

import math

import pytest
import torch
from arch_fixtures import load
from random_models import write_random_model

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.cli.bandwidth import read_bandwidth
from realizar_torch.generation.loop import Decoding
from realizar_torch.generation.request import make_request
from realizar_torch.generation.step_bytes import decode_bytes, weight_bytes
from realizar_torch.metrics import GenerationMetrics

TABLES = ("token_embd.weight", "position_embd.weight")


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_every_weight_but_the_table_of_tokens(tmp_path, tied):
    path = write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0", tied=tied)
    model, _ = rt.load(path)
    tensors = open_gguf(path).tensors
    expected = sum(info.nbytes for name, info in tensors.items() if tied or name not in TABLES)
    # and the rotary frequencies, which are computed
    assert expected <= weight_bytes(model) <= expected + 2048
    assert weight_bytes(model, rows=32) == weight_bytes(model)


def test_only_chosen_experts_are_read():
    model = load("mixtral")
    experts = model.config.experts
    # two sequences choose twice as many, and enough of them all
    one, two, all_of_them = (weight_bytes(model, rows) for rows in (1, 2, 32))
    share = experts.used / experts.count
    parts = sum(p.nbytes for layer in model.layers for p in layer.mlp.experts.parameters())
    assert all_of_them - one == pytest.approx(parts * (1 - share), abs=2)
    assert two - one == pytest.approx(parts * (min(1, 2 * share) - share), abs=2)


@pytest.mark.parametrize(("prompt", "steps"), [(1, 0), (1, 1), (5, 3), (12, 9), (40, 6)])
def test_keys_and_values_are_counted_position_by_position(tmp_path, prompt, steps):
    path = write_random_model(tmp_path / "m.gguf", "gemma3", fmt="Q5_0")
    model, _ = rt.load(path)
    config, rows = model.config, 3
    assert config.sliding_window and len({config.window(n) for n in range(config.num_layers)}) == 2
    expected = steps * weight_bytes(model, rows)
    for step in range(1, steps + 1):
        for layer in range(config.num_layers):
            seen = min(prompt + step, config.window(layer) or prompt + step)
            expected += rows * seen * 2 * config.num_kv_heads * config.head_dim * 4
    assert decode_bytes(model, rows, rows * prompt, steps) == expected


@pytest.mark.parametrize("count", [0, 1, 4])
def test_of_a_real_generation(tmp_path, count):
    model, _ = rt.load(write_random_model(tmp_path / "m.gguf", "llama", fmt="Q8_0"))
    ids = torch.randint(0, 200, (2, 7))
    decoding = Decoding(model, make_request(model, ids, None, max_new_tokens=count, eos_token_id=[]))
    assert len(list(decoding)) == count
    metrics = decoding.metrics
    assert metrics.decode_bytes == (decode_bytes(model, 2, 14, 3) if count == 4 else 0)
    if count < 4:
        assert metrics.gigabytes_per_second == metrics.bandwidth_share(10.0) == 0.0
        return
    expected = metrics.decode_bytes / (metrics.last_token - metrics.first_token) / 1e9
    assert (
        metrics.gigabytes_per_second == metrics.as_dict()["gigabytes_per_second"] == pytest.approx(expected)
    )
    assert metrics.bandwidth_share(2 * expected) == pytest.approx(0.5)


def test_nothing_is_ever_nan():
    for metrics in (
        GenerationMetrics(0, 0, 1),
        GenerationMetrics(3, 1, 1, 0.5, 0.5, decode_bytes=0),
        GenerationMetrics(3, 1, 1, 0.5, 0.5, decode_bytes=10),
    ):
        numbers = (metrics.gigabytes_per_second, metrics.bandwidth_share(0), metrics.bandwidth_share(5.0))
        assert numbers == (0.0, 0.0, 0.0)
        assert not any(isinstance(v, float) and math.isnan(v) for v in metrics.as_dict().values())


def test_the_bandwidth_of_this_machine_is_measured():
    # from a slow phone to the fastest cache
    assert 0.1 < read_bandwidth(torch.device("cpu")) < 10_000
