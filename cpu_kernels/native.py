"""Kernels called by address: compiled alone when first needed, never copied into their callers.

Numba links a callee's code into every caller and optimises it again there. A kernel that may need any of ten
formats would compile all ten; given an address, it compiles none.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic


def address_of(function: Dispatcher, arity: int) -> int:
    """Address of the C function ``void (int64, …)`` with ``arity`` arguments that ``function`` compiles to.

    ``function`` is made by ``@jit``, returns nothing and must not raise. Valid while the process lives.
    """
    signature = (types.int64,) * arity
    function.compile(signature)
    compiled = function.overloads[signature]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)


@intrinsic
def call_native(typing_context, address, arguments):
    """Call the function at ``address`` (of ``address_of``) with a tuple of int64 ``arguments``."""
    count = len(arguments)

    def generate(context, builder, signature, values):
        address, packed = values
        integer = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [integer] * count)
        pointer = builder.inttoptr(address, function.as_pointer())
        builder.call(pointer, cgutils.unpack_tuple(builder, packed, count))

    return types.void(types.int64, types.UniTuple(types.int64, count)), generate
