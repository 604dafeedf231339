"""A program that compiles the int8 kernels of the NEON target for aarch64 and counts instructions in them.

    python tests/arm_kernels.py FORMAT …

It prints JSON: format -> [its rows, its matmul] -> instruction -> count. A process of its own, because Numba
is kept from making machine code of this host, which need not have such instructions.
"""

import json
import re
import sys

import numba
from llvmlite import binding
from numba.core import codegen

from realizar_torch.cpu_kernels import jit as compiler
from realizar_torch.cpu_kernels.int8_matmul import matmul_tile_of
from realizar_torch.cpu_kernels.jit import jit
from realizar_torch.cpu_kernels.row_kernels import int8_rows_of
from realizar_torch.cpu_kernels.targets import NEON

WANTED = ("sdot", "fmla")


def stop_at_llvm() -> None:
    """Compile no further than LLVM code, and keep it out of the disk cache."""
    codegen.CPUCodeLibrary._finalize_final_module = lambda library: setattr(library, "_finalized", True)
    codegen.JITCodeLibrary.get_pointer_to_function = lambda library, name: library._ensure_finalized() or 1
    codegen.JITCPUCodegen.set_env = lambda generator, name, environment: None
    compiler._ContentCache._save_overload = lambda *arguments: None
    compiler._ContentCache._load_overload = lambda *arguments: None


def assembly(function, arity: int) -> str:
    function.compile((numba.int64,) * arity)
    module = function.inspect_llvm(function.signatures[0])
    module = re.sub(r'target triple = ".*"', 'target triple = "aarch64-unknown-linux-gnu"', module)
    module = re.sub(r'target datalayout = ".*"', "", module)
    module = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", module)
    arm = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = arm.create_target_machine(opt=2, features="+dotprod")
    return machine.emit_assembly(binding.parse_assembly(module))


def kernels(fmt: str) -> tuple[str, str]:
    rows_of_format, tile_of_format = int8_rows_of(fmt), matmul_tile_of(fmt)

    @jit
    def rows(weight, row_bytes, first, last, width, q, scale, sums, out):
        rows_of_format(NEON, weight, row_bytes, first, last, width, q, scale, sums, out)

    @jit
    def tile(weight, row_bytes, rows, width, used, columns, q, scale, sums, out):
        tile_of_format(NEON, weight, row_bytes, rows, width, used, columns, q, scale, sums, out)

    return assembly(rows, 9), assembly(tile, 10)


def main() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    stop_at_llvm()
    print(json.dumps({f: [{w: text.count(w) for w in WANTED} for text in kernels(f)] for f in sys.argv[1:]}))


if __name__ == "__main__":
    main()
