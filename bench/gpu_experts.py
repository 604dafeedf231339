"""Products with chosen experts on one GPU, in CUDA graphs, as a share of the read bandwidth.

    python bench/gpu_experts.py [--formats Q4_K Q6_K] [--tokens 1 8 32]

The bytes counted are those of the experts that the tokens chose, each once. Every case is compared with the
float64 oracle before its time is taken; a wrong one is reported instead of a speed.
"""

import argparse
import functools

import torch
from gpu_matvec import graph_time, layout_of, random_weight, read_bandwidth
from on_gpu import require_gpu

from realizar_torch import packing, reference
from realizar_torch.formats import get_packed_format
from realizar_torch.triton_kernels.experts import expert_matvec_int8
from realizar_torch.triton_kernels.quantize import quantize_activations

# experts, used, rows, columns: gate or up, then down, of Qwen3-30B-A3B, Mixtral 8x7B and Qwen1.5-MoE-A2.7B
SHAPES = (
    (128, 8, 768, 2048),
    (128, 8, 2048, 768),
    (8, 2, 14336, 4096),
    (8, 2, 4096, 14336),
    (60, 4, 1408, 2048),
)
# steps in one graph, each with choices of its own
STEPS = 20


def choices(experts: int, used: int, tokens: int) -> torch.Tensor:
    """int64 [tokens · used]: different experts for each token, as a router gives them."""
    return torch.rand(tokens, experts, device="cuda").topk(used).indices.flatten()


def is_right(y: torch.Tensor, q: tuple[torch.Tensor, ...], ids: torch.Tensor, blocks: torch.Tensor, fmt: str,
             used: int) -> bool:  # fmt: skip
    """The first two and the last two choices against float64, within 1e-5 of Σ|w x|."""
    columns = blocks.shape[-1] // get_packed_format(fmt).block_bytes * get_packed_format(fmt).block_size
    x = (q[0].double().unflatten(1, (-1, 32)) * q[1].double().unsqueeze(-1)).flatten(1)
    for choice in (0, 1, len(ids) - 2, len(ids) - 1):
        decoded = reference.dequantize(blocks[ids[choice]], fmt, columns, torch.float64)
        row = x[choice // used]
        bound = 1e-5 * (decoded.abs() @ row.abs())
        if not bool(((y[choice].double() - decoded @ row).abs() <= bound).all()):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["Q4_K", "Q6_K"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32])
    args = parser.parse_args()
    require_gpu()
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth:.0f} GB/s")
    for experts, used, rows, columns in SHAPES:
        for fmt in args.formats:
            layout, spec = layout_of(fmt), get_packed_format(fmt)
            blocks = random_weight(fmt, experts * rows, columns).unflatten(0, (experts, rows))
            weight = packing.pack(blocks, fmt, layout)
            for tokens in args.tokens:
                x = torch.randn(tokens, columns, device="cuda")
                q = quantize_activations(x, spec.blocks(columns) * spec.block_size)
                steps = [choices(experts, used, tokens) for _ in range(STEPS)]
                run = functools.partial(
                    expert_matvec_int8,
                    *q,
                    weight=weight,
                    fmt=fmt,
                    in_features=columns,
                    share=used,
                    layout=layout,
                )
                name = f"{experts} x {rows} x {columns} {fmt} {tokens:3} tokens"
                if not is_right(run(experts=steps[0]), q, steps[0], blocks, fmt, used):
                    print(f"{name}: WRONG")
                    continue
                time = graph_time([functools.partial(run, experts=ids) for ids in steps]) / STEPS
                read = sum(len(ids.unique()) for ids in steps) / STEPS * weight[0].nbytes
                share = read / time / 1e6 / bandwidth
                print(f"{name}: {time * 1e3:7.1f} us, {share:5.0%} of the read bandwidth")


if __name__ == "__main__":
    main()
