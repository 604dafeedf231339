"""Instructions of the innermost loops of the int8 CPU kernels, counted in the compiled code of each format.

    python bench/cpu_instructions.py [--target vnni]

"matvec": per weight of a row. "matmul": per 64 products, the work of one 512-bit dot product. Counted between
the label of the loop that multiplies and its backward jump; what is done once per row or tile is not in it.
"""

import argparse
import re

import numba

from realizar_torch.cpu_kernels.int8_matmul import SUB_BLOCKS_OF_16, matmul_tile_of
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.row_kernels import int8_rows_of
from realizar_torch.cpu_kernels.targets import TARGETS, Target, best_target
from realizar_torch.formats import FORMATS

_LABEL, _JUMP = re.compile(r"^(\.LBB\w+):"), re.compile(r"^\tj\w+\t(\.LBB\w+)$")
_DOTS = {"vpdpbusd": "vpdpbusd", "pmaddubsw": "vpmaddubsw", "multiply": "vpmulld"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets = {target.name: target for target in TARGETS}
    parser.add_argument("--target", choices=targets, default=best_target().name)
    target = targets[parser.parse_args().target]
    print(f"{target.name}: instructions per weight (matvec), per 64 products (matmul)")
    for fmt in (name for name, spec in FORMATS.items() if spec.packed):
        # legacy formats go four blocks at a time, Q4_K to Q6_K four rows, the others by super-block
        size = FORMATS[fmt].block_size
        weights = size if fmt in ("Q2_K", "Q3_K") else 4 * size
        sub = 16 if fmt in SUB_BLOCKS_OF_16 else 32
        products = sub * 16 * target.tile_vectors * target.tile_columns
        rows, tile = loops(fmt, target)
        print(f"{fmt}: matvec {len(rows) / weights:.2f}  matmul {64 * len(tile) / products:.2f}")


def loops(fmt: str, target: Target) -> tuple[list[str], list[str]]:
    """The loop over blocks of the row kernel and the loop over sub-blocks of the matmul."""
    rows_of_format, tile_of_format = int8_rows_of(fmt), matmul_tile_of(fmt)

    @jit
    def rows(weight, row_bytes, first, last, width, q, scale, sums, out):
        rows_of_format(target, weight, row_bytes, first, last, width, q, scale, sums, out)

    @jit
    def tile(weight, row_bytes, rows, width, used, columns, q, scale, sums, out):
        tile_of_format(target, weight, row_bytes, rows, width, used, columns, q, scale, sums, out)

    return multiplying_loop(rows, 9, target), multiplying_loop(tile, 10, target)


def multiplying_loop(function, arity: int, target: Target) -> list[str]:
    """The instructions of the innermost loop with the most dot products."""
    function.compile((numba.int64,) * arity)
    lines = function.inspect_asm(function.signatures[0]).splitlines()
    labels, found = {}, []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif (jump := _JUMP.match(line)) and jump[1] in labels:
            found.append((labels[jump[1]], number))
    innermost = [(a, b) for a, b in found if not any(a < c and d < b for c, d in found)]
    bodies = [[text for text in lines[a : b + 1] if re.match(r"^\t[a-z]", text)] for a, b in innermost]
    dot = _DOTS[target.dot]
    return max(bodies, key=lambda body: sum(dot in text for text in body))


if __name__ == "__main__":
    main()
