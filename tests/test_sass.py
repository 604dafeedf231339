"""What the compiler makes of the matvec loops, read without a GPU: other versions choose other layouts."""

import pytest
from compiled_kernels import printed_by

from realizar_torch.formats import PACKED_FORMATS

pytest.importorskip("triton")

LOOPS = ["Q4_K:ggml:4096", "Q6_K:planar:4096", "Q8_0:planar:4096", "Q4_0:planar:4096"]


def compiled(names: list[str]) -> dict[str, dict[str, int]]:
    return printed_by("sass_of_kernels.py", *names)


def test_nothing_moves_between_threads_inside_a_loop() -> None:
    for name, loop in compiled(LOOPS).items():
        assert not loop.keys() & {"BAR", "SHFL", "LDS", "STS"}, (name, loop)
        # one dp4a for four weights
        assert loop["IDP"] >= 16, (name, loop)
        # 1.3 to 2.0 instructions per weight as measured, and some room for other compilers
        assert sum(loop.values()) <= 2.5 * 4 * loop["IDP"], (name, sum(loop.values()), loop["IDP"])
        # quants, headers and activations come 16 bytes at a time: one by one they would be twice as many
        assert loop["LDG"] <= 0.8 * loop["IDP"], (name, loop)


def test_rows_of_one_block_compile_in_every_format() -> None:
    # one lane: the compiler once refused a hint that it had moved to a scalar
    names = [f"{fmt.name}:ggml:{fmt.block_size}" for fmt in PACKED_FORMATS]
    assert compiled(names).keys() == set(names)
