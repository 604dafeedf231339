"""What the compiler makes of the matvec loops, read without a GPU: other versions choose other layouts."""

import pytest
from compiled_kernels import printed_by

from realizar_torch.formats import PACKED_FORMATS

pytest.importorskip("triton")

from realizar_torch.triton_kernels.configs import choose_ring

LOOPS = ["Q4_K:ggml:4096", "Q6_K:planar:4096", "Q8_0:planar:4096", "Q4_0:planar:4096"]


def compiled(names: list[str]) -> dict[str, dict[str, int]]:
    return printed_by("sass_of_kernels.py", *names)["loops"]


def test_nothing_moves_between_threads_inside_a_loop() -> None:
    for name, loop in compiled(LOOPS).items():
        assert not loop.keys() & {"BAR", "SHFL", "LDS", "STS"}, (name, loop)
        # one dp4a for four weights
        assert loop["IDP"] >= 16, (name, loop)
        # 1.3 to 2.0 instructions per weight as measured, and some room for other compilers
        assert sum(loop.values()) <= 2.5 * 4 * loop["IDP"], (name, sum(loop.values()), loop["IDP"])
        # quants, headers and activations come 16 bytes at a time: one by one they would be twice as many
        assert loop["LDG"] <= 0.8 * loop["IDP"], (name, loop)


def test_a_ring_is_filled_by_copies_and_nothing_else_is_read_in_its_loop() -> None:
    found = printed_by("sass_of_kernels.py", *(f"{name}:ring" for name in (*LOOPS, "Q4_K:ggml:14336")))
    for name, loop in found["loops"].items():
        # no loads of activations, no spilled registers
        assert not loop.keys() & {"LDG", "LDL", "STL"}, (name, loop)
        assert loop["IDP"] >= 16 and 1 <= loop["LDGSTS"] <= loop["IDP"] / 2, (name, loop)
        assert sum(loop.values()) <= 2.5 * 4 * loop["IDP"], (name, sum(loop.values()), loop["IDP"])
    for name, (wait, *steps) in found["rings"].items():
        fmt, _, columns, _ = name.split(":")
        ring = choose_ring(fmt, 1 << 15, int(columns))
        assert ring.stages > 1 and wait == f"cp.async.wait_group {ring.stages - 1}", name
        # all copies are there for all threads, and read by all before others take their place
        assert [step.removeprefix("barrier").removeprefix("bar") for step in steps] == [
            ".sync", "ld.shared", ".sync",
        ], (name, steps)  # fmt: skip


def test_a_ring_of_floats_reads_no_activations_in_its_loop() -> None:
    found = printed_by("sass_of_kernels.py", *(f"{name}:float" for name in (*LOOPS, "Q4_K:ggml:14336")))
    for name, loop in found["loops"].items():
        assert not loop.keys() & {"LDG", "LDL", "STL"} and loop["LDGSTS"], (name, loop)
        # one fused product a weight; all in all 4.1 to 5.1 instructions as measured
        assert loop["FFMA"] >= 64 and sum(loop.values()) <= 6 * loop["FFMA"], (name, loop)


def test_rows_of_one_block_compile_in_every_format() -> None:
    # one lane: the compiler once refused a hint that it had moved to a scalar
    names = [f"{fmt.name}:ggml:{fmt.block_size}" for fmt in PACKED_FORMATS]
    assert compiled(names).keys() == set(names)


def test_lanes_that_add_products_to_each_other_hold_one_sum() -> None:
    found = printed_by("fused_sums.py")
    assert {"attention_kernel", "_heads_kernel", "_norm_heads_kernel"} <= found.keys()
    assert not any(found.values()), found
