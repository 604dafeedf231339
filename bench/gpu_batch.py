"""Tokens per second of batched decoding on synthetic Llama 3 models, by rows, beside the read bandwidth.

    python bench/gpu_batch.py [--model 8b] [--batch 1 2 4 8 16 32] [--sampled] [--out FILE]

Prompts of 128 tokens, 128 new ones each, through BatchedGenerator: stops are checked and tokens read as in
any job. The clock starts when all rows decode. Before that, every row's logits are compared, teacher-forced,
with those of the same prompt decoded alone; no speed is printed where they differ.
"""

import argparse
import dataclasses
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_decode import read_bandwidth
from on_gpu import require_gpu
from synthetic import SHAPES, load_synthetic
from torch import Tensor

from realizar_torch.generation.batch import BatchedGenerator
from realizar_torch.generation.batch_rows import Text, fill_row, rows_of
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.gpu_linears import GpuLinears
from realizar_torch.generation.sampling import SamplingParams
from realizar_torch.generation.step import new_state

PROMPT, NEW, CAPACITY, CHECKED = 128, 128, 384, 3
# rms of the difference over rms of the logits: alone a row's activations are int8, among three or more fp16;
# gpu_decode.py allows 0.15 from exact numerics
TOLERANCE = 0.1
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
# kernels that a worker compiles: those of the GpuLinears methods that the other workers leave out
PARTS = ("qkv", "_gate_up", "linear")


def prompts(count: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, vocab, (count, PROMPT), generator=generator).tolist()


def load(name: str) -> CausalLM:
    return load_synthetic(name, "cuda", dtype=torch.bfloat16, activations="int8", max_seq_len=CAPACITY)


def _compile(job: tuple[str, int, str]) -> None:
    """Fills the kernel cache from a worker process: eight layers, which have both mixes of formats."""
    name, rows, part = job
    SHAPES["short"] = dataclasses.replace(SHAPES[name], layers=8)
    others = [mock.patch.object(GpuLinears, other, lambda *_, **__: None) for other in PARTS if other != part]
    model = load("short")
    state = new_state(model, rows, CAPACITY, pooled=False)
    with torch.inference_mode(), others[0], others[1]:
        state.prepare(model)
        state.decoder.begin_rows(cuda_graph=False)
        state.decoder.issue_rows()
        if part == PARTS[0] and rows == 1:
            fill_row(model, state, 0, [0] * (PROMPT - 1), 0)
    torch.cuda.synchronize()


def forced_logits(model: CausalLM, texts: list[list[int]], rows: int) -> Tensor:
    """fp32 [texts, CHECKED, V]: behind all but the last CHECKED - 1 ids of each text, and one id more each
    time; ``rows`` texts at once."""
    state, found = new_state(model, rows, CAPACITY, pooled=False), []
    with torch.inference_mode():
        batch = rows_of(model, state, True)
        for first in range(0, len(texts), rows):
            steps = []
            for step in range(CHECKED):
                for row, ids in enumerate(texts[first : first + rows]):
                    known = ids[: len(ids) - CHECKED + 1 + step]
                    batch.place(row, Text(known, 0, len(known) - 1 if step else 0, SamplingParams(), 0))
                batch.issue()
                batch.read()
                steps.append(state.decoder.step.logits.cpu())
            found.append(torch.stack(steps, 1))
    return torch.cat(found)


def run(batch: BatchedGenerator, texts: list[list[int]], options: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds until every row decodes, seconds from there on, and tokens that were read in these."""
    for ids in texts:
        batch.add(ids, max_new_tokens=NEW, eos_token_id=[], **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    # one step is on its way then, and its tokens are the first that count
    batch.step()
    batch.step()
    ready = time.perf_counter()
    while batch.step():
        pass
    end = time.perf_counter()
    tokens = sum(len(done.token_ids) for done in batch.collect())
    assert tokens == len(texts) * NEW
    return ready - start, end - ready, tokens - len(texts)


def nbytes(model: CausalLM, rows: int) -> int:
    """Bytes that a step reads: packed weights, and keys and values at half of the way."""
    weights = sum(
        module.stored.nbytes
        for module in model.modules()
        if hasattr(module, "stored") and module is not model.embed_tokens
    )
    config = model.config
    per_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    return weights + rows * (PROMPT + NEW // 2) * per_position


def measure(
    model: CausalLM, rows: int, options: dict[str, Any], alone: Tensor, limit: float
) -> dict[str, Any]:
    texts = prompts(rows, model.config.vocab_size)
    difference = forced_logits(model, texts, rows) - alone[:rows]
    error = float(difference.square().mean().sqrt() / alone[:rows].square().mean().sqrt())
    batch = BatchedGenerator(model, max_batch=rows)
    run(batch, texts, options)
    joining, seconds, tokens = min((run(batch, texts, options) for _ in range(2)), key=lambda times: times[1])
    stats = batch._state.decoder.stats
    ms = 1000 * seconds * rows / tokens
    return {
        "rows": rows,
        "tokens_per_second": tokens / seconds,
        "step_ms": ms,
        "prompt_ms": 1000 * joining / rows,
        "share": nbytes(model, rows) / ms / 1e6 / limit,
        "error": error,
        "right": error <= TOLERANCE and stats.fallback is None,
        "captures": stats.captures,
        "memory": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--sampled", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    started = time.perf_counter()
    jobs = [(options.model, rows, part) for rows in sorted({1, *options.batch}) for part in PARTS]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        pool.map(_compile, jobs, chunksize=1)
    print(f"kernels compiled after {time.perf_counter() - started:.0f} s", flush=True)
    limit = read_bandwidth()
    model = load(options.model)
    alone = forced_logits(model, prompts(max(options.batch), model.config.vocab_size), 1)
    ready = time.perf_counter() - started
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s; ready after {ready:.0f} s", flush=True)
    records: list[dict[str, Any]] = []
    for rows in options.batch:
        record = measure(model, rows, SAMPLED if options.sampled else {}, alone, limit)
        records.append(record)
        speed = (
            f"{record['tokens_per_second']:.0f} tok/s, step {record['step_ms']:.3f} ms "
            f"({record['step_ms'] / records[0]['step_ms']:.2f}x), {record['share']:.0%} of the read bandwidth"
            if record["right"]
            else "WRONG"
        )
        print(
            f"{options.model} batch {rows}: {speed}; {record['prompt_ms']:.1f} ms a prompt; logits off by "
            f"{record['error']:.4f} rms; {record['captures']} captures",
            flush=True,
        )
        if options.out:
            report = {"device": torch.cuda.get_device_name(), "read_gbps": limit, "model": options.model}
            report |= {"sampled": options.sampled, "prompt": PROMPT, "new": NEW, "runs": records}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"done after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
