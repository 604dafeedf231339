"""Prompts on the GPU: tokens per second, and time to the first token split into host and device.

    python bench/gpu_prefill.py --model 8b --tokens 32 128 512 2048 4096 --out prefill.json

Weights are random, in the shapes and formats of a Q4_K_M file. A case is right, and its speed printed, if the
logits of the last position agree with the same model's in fp32, module by module. Shares are of a bf16
torch.matmul measured in the same run.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from on_gpu import require_gpu
from synthetic import SHAPES, Shape, load_synthetic

from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.generation.step import new_state, prefill

# of the root mean square of the logits. bf16: weights, inputs and outputs of 4 products per layer are rounded
# by up to 2^-9, rms 2^-9/sqrt(3), so 32 layers make sqrt(3 * 4 * 32) times that, 0.022, and this is twice as
# much; int8 as in gpu_decode.py
TOLERANCE = {"many": 0.044, "few": 0.15}
# up to so many rows a product may take int8 activations
FEW = 128
REPEATS = 5


def milliseconds(call: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def tensor_core_limit() -> float:
    """TFLOP/s of a bf16 product of 8192 × 8192 matrices, the best of ten."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / min(milliseconds(lambda: a @ b) for _ in range(10)) / 1e9


def operations(shape: Shape, tokens: int) -> float:
    """Floating point operations of a prompt: products of all layers, causal attention, the head once."""
    attention = shape.heads * shape.dim
    weights = shape.hidden * (2 * attention + 2 * shape.kv_heads * shape.dim + 3 * shape.inner)
    scores = 2 * attention * tokens * (tokens + 1) / 2
    return 2 * (shape.layers * (weights * tokens + scores) + shape.vocab * shape.hidden)


def ids_of(shape: Shape, tokens: int) -> torch.Tensor:
    return torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(tokens)).cuda()


def exact_logits(name: str, counts: list[int]) -> dict[int, torch.Tensor]:
    """The last position's, of fp32 modules."""
    model = load_synthetic(name, "cuda", dtype=torch.float32, activations="float", max_seq_len=max(counts))
    with torch.inference_mode():
        return {count: model(ids_of(SHAPES[name], count), logits_to_keep=1).logits[:, -1] for count in counts}


def time_of(model: CausalLM, ids: torch.Tensor) -> dict[str, float]:
    """Milliseconds of one request: until the first token is known, until the last launch, on the device."""
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun = time.perf_counter()
    state = new_state(model, 1, ids.shape[1] + 1)
    start.record()
    logits = prefill(model, ids, None, state)
    end.record()
    issued = time.perf_counter()
    logits.argmax(-1).item()
    done = time.perf_counter()
    state.close()
    return {
        "first_token_ms": 1e3 * (done - begun),
        "host_ms": 1e3 * (issued - begun),
        "device_ms": start.elapsed_time(end),
    }


def measure(name: str, model: CausalLM, count: int, exact: torch.Tensor, limit: float) -> dict[str, Any]:
    ids = ids_of(SHAPES[name], count)
    with torch.inference_mode():
        state = new_state(model, 1, count + 1)
        logits = prefill(model, ids, None, state).clone()
        state.close()
        times = min((time_of(model, ids) for _ in range(REPEATS)), key=lambda found: found["first_token_ms"])
    error = float((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    right = error <= TOLERANCE["few" if count <= FEW else "many"]
    speed = 1e3 * count / times["first_token_ms"]
    share = operations(SHAPES[name], count) / times["first_token_ms"] / 1e9 / limit
    text = (
        f"{speed:,.0f} tok/s, first token after {times['first_token_ms']:.2f} ms "
        f"(host {times['host_ms']:.2f}, device {times['device_ms']:.2f}), {share:.0%} of the matmul rate"
    )
    text = text if right else "WRONG"
    print(f"{name} prompt of {count}: {text}; logits off by {error:.4f} rms", flush=True)
    facts = {"model": name, "tokens": count, "tokens_per_second": speed, "share": share}
    return facts | times | {"error": error, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["8b"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[32, 128, 512, 2048, 4096])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_gpu()
    limit = tensor_core_limit()
    print(f"{torch.cuda.get_device_name()}: bf16 matmul {limit:.0f} TFLOP/s", flush=True)
    records = []
    for name in options.model:
        exact = exact_logits(name, options.tokens)
        torch.cuda.empty_cache()
        model = load_synthetic(
            name, "cuda", dtype=torch.bfloat16, activations="int8", max_seq_len=max(options.tokens) + 64
        )
        for count in options.tokens:
            records.append(measure(name, model, count, exact[count], limit))
    if options.out:
        facts = {"device": torch.cuda.get_device_name(), "matmul_tflops": limit, "runs": records}
        options.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
