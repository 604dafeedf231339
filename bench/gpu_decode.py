"""Tokens per second of the decode graph on synthetic Llama 3 models, and its share of the read bandwidth.

    python bench/gpu_decode.py [--model 8b 1b] [--depth 128 8192] [--activations int8 float] [--out FILE]

Before a speed is printed, the graph's logits at three positions are compared with decoded weights and
torch.matmul in fp32, and its tokens with those of the same launches issued one by one.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from synthetic import SHAPES, load_synthetic

from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.graph import DecodeGraph

PROMPT, POSITIONS = 12, 3
# of the root mean square of the logits: bf16 keys and values; int8 activations of 7 products per layer
TOLERANCE = {"float": 0.03, "int8": 0.15}


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


def reference_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last POSITIONS tokens; so many rows are decoded and multiplied in fp32."""
    model = load_synthetic(name, "cuda", dtype=torch.float32, activations="float", max_seq_len=64)
    with torch.inference_mode():
        return model(ids).logits[:, -POSITIONS:]


def graph_error(graph: DecodeGraph, model: CausalLM, ids: torch.Tensor, expected: torch.Tensor) -> float:
    """rms error of the graph's logits, teacher-forced, over the rms of ``expected``."""
    found = []
    with torch.inference_mode():
        logits = model(ids[:, :PROMPT], cache=graph.cache, logits_to_keep=1).logits[:, -1]
        graph.begin(logits)
        for position in range(PROMPT, PROMPT + POSITIONS):
            graph.step.tokens.copy_(ids[:, position])
            graph.issue()
            found.append(graph.step.logits.clone())
        graph.finish()
    error = torch.stack(found, 1) - expected
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


def measure(name: str, activations: str, depth: int, options: argparse.Namespace, limit: float) -> dict:
    shape = SHAPES[name]
    capacity = min(shape.context, -(-(depth + options.steps + 16) // 256) * 256)
    started = time.perf_counter()
    model = load_synthetic(
        name, "cuda", dtype=torch.bfloat16, activations=activations, max_seq_len=max(capacity, 64)
    )
    weights = sum(
        tensor.nbytes
        for module in model.modules()
        if module is not model.embed_tokens
        for tensor in [getattr(module, "stored", None)]
        if tensor is not None
    )
    graph = DecodeGraph(model, 1)
    ids = torch.randint(
        0, shape.vocab, (1, PROMPT + POSITIONS), generator=torch.Generator().manual_seed(2)
    ).cuda()
    error = graph_error(graph, model, ids, reference_logits(name, ids))
    ready = time.perf_counter() - started
    graph.cache.keys.normal_()
    graph.cache.values.normal_()
    eager, _ = run(graph, depth, min(16, options.steps), False)
    before = torch.cuda.memory_allocated()
    captured, ms = min((run(graph, depth, options.steps, True) for _ in range(3)), key=lambda pair: pair[1])
    same = captured[: len(eager)] == eager and torch.cuda.memory_allocated() == before
    right = error <= TOLERANCE[activations] and same and graph.stats.fallback is None
    record = {
        "model": name,
        "activations": activations,
        "depth": depth,
        "ms": ms,
        "tokens_per_second": 1000 / ms,
        "weight_bytes": weights,
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
        f"{name} {activations} depth {depth}: {speed}; logits off by {error:.4f} rms, tokens equal to eager: "
        f"{same}; kernels {record['kernels']} (9 x {shape.layers} + 8 = {9 * shape.layers + 8}); "
        f"{graph.stats}; ready after {ready:.1f} s",
        flush=True,
    )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["8b", "1b"], choices=SHAPES)
    parser.add_argument("--depth", nargs="*", type=int, default=[128, 8192])
    parser.add_argument("--activations", nargs="*", default=["int8"], choices=TOLERANCE)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument(
        "--kernels", action="store_true", help="count the kernels of a step with the profiler"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    records = []
    for name in options.model:
        for activations in options.activations:
            for depth in options.depth:
                records.append(measure(name, activations, depth, options, limit))
                torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(
            json.dumps(
                {"device": torch.cuda.get_device_name(), "read_gbps": limit, "runs": records}, indent=1
            )
        )


if __name__ == "__main__":
    main()
