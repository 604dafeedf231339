"""Decode attention on one GPU in CUDA graphs, caches rotated beyond L2: µs and share of the read bandwidth by
depth.

python bench/gpu_attention.py [--sweep]
"""

import argparse
import itertools
import math
import multiprocessing

import torch
from gpu_matvec import graph_time, read_bandwidth

from realizar_torch.triton_kernels.attention import attention_scratch, decode_attention
from realizar_torch.triton_kernels.configs import AttentionLaunch, choose_attention

HEADS, KV_HEADS, DIM = 32, 8, 128


def launches() -> list[AttentionLaunch]:
    shapes = itertools.product((32, 64, 128), (1, 2), (1, 2, 3), (4, 8), (8, 32))
    return [
        AttentionLaunch(s, max(1, 128 * m // s), st, w, mg) for s, m, st, w, mg in shapes if s * st <= 192
    ]


class Case:
    """Caches of one depth, several of them, and the heads of one new position."""

    def __init__(self, depth: int, copies: int):
        self.depth = depth
        capacity = -(-(depth + 1) // 64) * 64
        self.caches = [
            tuple(torch.randn(1, KV_HEADS, capacity, DIM, device="cuda").bfloat16() for _ in range(2))
            for _ in range(copies)
        ]
        self.qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * DIM, device="cuda")
        self.positions = torch.full((1,), depth, dtype=torch.int32, device="cuda")
        # no rotation, which keeps the check below short
        self.cos = torch.ones(capacity, DIM // 2, device="cuda")
        self.sin = torch.zeros(capacity, DIM // 2, device="cuda")
        self.scratch = attention_scratch(1, HEADS, KV_HEADS, DIM, capacity, torch.device("cuda"))
        self.nbytes = 2 * 2 * KV_HEADS * depth * DIM

    def run(self, index: int, launch: AttentionLaunch | None) -> torch.Tensor:
        return decode_attention(
            self.qkv, *self.caches[index], self.positions, self.cos, self.sin,
            scale=1 / math.sqrt(DIM), scratch=self.scratch, quantize=True, launch=launch,
        )[0]  # fmt: skip

    def right(self, launch: AttentionLaunch | None) -> bool:
        found = self.run(0, launch)
        k, v = (cache[0, :, : self.depth + 1].double() for cache in self.caches[0])
        q = self.qkv[0, : HEADS * DIM].view(KV_HEADS, -1, DIM).double()
        scores = torch.einsum("hgd,hsd->hgs", q, k)
        expected = (scores / math.sqrt(DIM)).softmax(-1) @ v
        return bool((found.view_as(expected) - expected).abs().max() < 2e-2)

    def microseconds(self, launch: AttentionLaunch | None) -> float | None:
        if not self.right(launch):
            return None
        calls = [lambda i=i: self.run(i, launch) for i in range(len(self.caches))] * (24 // len(self.caches))
        return 1000 * graph_time(calls) / len(calls)


def _compile(job: tuple[int, AttentionLaunch | None]) -> None:
    depth, launch = job
    Case(depth, 1).run(0, launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {limit:.0f} GB/s", flush=True)
    depths = (128, 1024, 8192)
    shapes = launches() if options.sweep else [choose_attention(DIM, 2)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(_compile, [(depth, shape) for depth in depths for shape in shapes], chunksize=4)
    for depth in depths:
        case = Case(depth, 6)
        results = [(case.microseconds(shape), shape) for shape in shapes]
        wrong = sum(time is None for time, _ in results)
        for time, shape in sorted(((t, s) for t, s in results if t is not None), key=lambda item: item[0])[
            :6
        ]:
            print(
                f"depth {depth}: {time:6.2f} us {case.nbytes / time / 1e3 / limit:4.0%} {shape}; {wrong} bad",
                flush=True,
            )


if __name__ == "__main__":
    main()
