"""Tokens per second of the decode graph on synthetic Llama 3 models, and its share of the read bandwidth.

    python bench/gpu_decode.py [--model 8b 1b] [--depth 128 8192 32768] [--kv bf16 fp8 int8]
                               [--activations int8 float] [--out FILE]

Before a speed is printed, the graph's logits at three positions are compared with decoded weights and
torch.matmul in fp32 over a cache of the same type, and its tokens with those of the same launches issued one
by one. With several depths, each has its share of the rate at the first one.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from on_gpu import require_gpu
from synthetic import SHAPES, load_synthetic

from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.graph import DecodeGraph
from realizar_torch.generation.rehearsal import rehearse
from realizar_torch.nn.cache_rows import LARGEST, quantize_rows
from realizar_torch.nn.kv_cache import KVCache

PROMPT, POSITIONS = 12, 3
# of the root mean square of the logits: bf16 keys and values; int8 activations of 7 products per layer
TOLERANCE = {"float": 0.03, "int8": 0.15}
KV = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def read_bandwidth() -> float:
    """GB/s of ``torch.sum`` over 2 GB of int64, the best of five."""
    data = torch.ones(2**28, dtype=torch.int64, device="cuda")
    return max(data.nbytes / milliseconds(data.sum) / 1e6 for _ in range(5))


def milliseconds(call: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def reference_logits(name: str, ids: torch.Tensor, kinds: list[str]) -> dict[str, torch.Tensor]:
    """Of the last POSITIONS tokens, by kind of cache; so many rows are decoded and multiplied in fp32."""
    model = load_synthetic(name, "cuda", dtype=torch.float32, activations="float", max_seq_len=64)
    logits = {}
    rehearse(lambda: model(ids, logits_to_keep=POSITIONS))
    for kind in kinds:
        cache = None
        if KV[kind] in LARGEST:
            cache = KVCache(model.config, 1, ids.shape[1], device=model.device, dtype=KV[kind])
        with torch.inference_mode():
            logits[kind] = model(ids, cache=cache, logits_to_keep=POSITIONS).logits
    return logits


def fill(cache: KVCache) -> None:
    """Random keys and values."""
    for index, memory in enumerate((cache.keys, cache.values)):
        for layer, rows in enumerate(memory):
            if cache.scales is None:
                rows.normal_()
            else:
                elements, scales = quantize_rows(torch.randn(rows.shape, device=rows.device), cache.dtype)
                rows.copy_(elements)
                cache.scales[index, layer].copy_(scales)


def graph_error(graph: DecodeGraph, ids: torch.Tensor, expected: torch.Tensor) -> float:
    """rms error of the graph's last logits, all tokens fed one by one, over the rms of ``expected``."""
    found = []
    with torch.inference_mode():
        # which token these choose does not matter
        graph.begin(torch.zeros_like(graph.step.logits))
        for column in ids.T:
            graph.step.tokens.copy_(column)
            graph.issue()
            found.append(graph.step.logits.clone())
        graph.finish()
    error = torch.stack(found[-POSITIONS:], 1) - expected
    return float(error.square().mean().sqrt() / expected.square().mean().sqrt())


def run(graph: DecodeGraph, depth: int, steps: int, cuda_graph: bool) -> tuple[list[int], float]:
    """Tokens of ``steps`` steps behind ``depth`` positions, and milliseconds per step."""
    graph.cache.reset()
    graph.cache.advance(depth)
    logits = torch.randn(graph.step.logits.shape, generator=torch.Generator().manual_seed(1)).cuda()
    tokens = []
    with torch.inference_mode():
        graph.begin(logits, cuda_graph=cuda_graph)
        graph.issue()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(steps):
            graph.issue()
            tokens += graph.read()
        end.record()
        end.synchronize()
    return tokens, start.elapsed_time(end) / steps


def kernels_per_step(graph: DecodeGraph) -> int:
    """Kernels that one replay launches, as the profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.issue()
        graph.finish()
    on_device = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    return sum("Memcpy" not in name and "Memset" not in name for name in on_device)


def prompt_ids(name: str) -> torch.Tensor:
    shape = (1, PROMPT + POSITIONS)
    return torch.randint(0, SHAPES[name].vocab, shape, generator=torch.Generator().manual_seed(2)).cuda()


def measure(
    name: str,
    model: CausalLM,
    kv: str,
    depth: int,
    expected: torch.Tensor,
    options: argparse.Namespace,
    limit: float,
) -> dict:
    shape, activations = SHAPES[name], model.lm_head.activations
    capacity = min(shape.context, -(-(depth + options.steps + 16) // 256) * 256)
    started = time.perf_counter()
    model.kv_dtype = KV[kv]
    weights = sum(
        tensor.nbytes
        for module in model.modules()
        if module is not model.embed_tokens
        for tensor in [getattr(module, "stored", None)]
        if tensor is not None
    )
    graph = DecodeGraph(model, 1, max_seq_len=max(capacity, 64))
    rehearse(graph.rehearse)
    compiled = time.perf_counter() - started
    error = graph_error(graph, prompt_ids(name), expected)
    ready = time.perf_counter() - started
    fill(graph.cache)
    eager, _ = run(graph, depth, min(16, options.steps), False)
    before = torch.cuda.memory_allocated()
    captured, ms = min((run(graph, depth, options.steps, True) for _ in range(3)), key=lambda pair: pair[1])
    same = captured[: len(eager)] == eager and torch.cuda.memory_allocated() == before
    right = error <= TOLERANCE[activations] and same and graph.stats.fallback is None
    record = {
        "model": name,
        "activations": activations,
        "kv": kv,
        "depth": depth,
        "ms": ms,
        "tokens_per_second": 1000 / ms,
        "weight_bytes": weights,
        "cache_bytes": graph.cache.memory_bytes,
        "share": weights / ms / 1e6 / limit,
        "error": error,
        "right": right,
        "kernels": kernels_per_step(graph) if options.kernels else None,
        "memory": torch.cuda.max_memory_allocated(),
    } | vars(graph.stats)
    speed = (
        f"{1000 / ms:.0f} tok/s, {ms:.3f} ms, {record['share']:.0%} of the read bandwidth"
        if right
        else "WRONG"
    )
    print(
        f"{name} {activations} kv {kv} depth {depth}: {speed}; logits off by {error:.4f} rms, tokens "
        f"equal to eager: {same}; kernels {record['kernels']} (9 x {shape.layers} + 8 = "
        f"{9 * shape.layers + 8}); {graph.stats}; ready after {ready:.1f} s, compiled after {compiled:.1f}",
        flush=True,
    )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["8b", "1b"], choices=SHAPES)
    parser.add_argument("--depth", nargs="*", type=int, default=[128, 8192])
    parser.add_argument("--kv", nargs="*", default=["bf16"], choices=KV)
    parser.add_argument("--activations", nargs="*", default=["int8"], choices=TOLERANCE)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument(
        "--kernels", action="store_true", help="count the kernels of a step with the profiler"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    records = []
    for name in options.model:
        expected = reference_logits(name, prompt_ids(name), options.kv)
        torch.cuda.empty_cache()
        for activations in options.activations:
            model = load_synthetic(
                name, "cuda", dtype=torch.bfloat16, activations=activations, max_seq_len=64
            )
            for kv in options.kv:
                found = [
                    measure(name, model, kv, depth, expected[kv], options, limit) for depth in options.depth
                ]
                if len(found) > 1:
                    shares = (f"{found[0]['ms'] / record['ms']:.1%}" for record in found[1:])
                    print(
                        f"{name} {activations} kv {kv}: {' and '.join(shares)} of the rate at depth "
                        f"{options.depth[0]}"
                    )
                records += found
                torch.cuda.empty_cache()
            del model
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "read_gbps": limit, "runs": records}, indent=1
            )
        )


if __name__ == "__main__":
    main()
