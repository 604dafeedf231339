"""Derivative rules as dispatcher kernels, so that every mode of differentiation meets the same rule.

``torch.library.register_autograd`` knows reverse mode alone: forward mode sees zeros without a word, and
``torch.func`` an error from inside torch. It costs more per call, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from realizar_torch.errors import FormatError
from realizar_torch.ops.library import LIBRARY


def register(
    name: str,
    save: Callable[..., None],
    backward: Callable[..., tuple[Tensor | None, ...]],
    jvp: Callable[..., Tensor],
) -> None:
    """Give ``realizar_torch::name`` its derivatives, as ``torch.autograd.Function`` states them.

    ``save(ctx, *args, **kwargs)`` has the op's arguments, ``backward(ctx, grad)`` a gradient and
    ``jvp(ctx, *tangents)`` a tangent for each positional one (trailing defaults may be left out).
    """
    below = _below(name)

    def forward(ctx: Any, *args: Any) -> Tensor:
        *arguments, (keyset, kwargs) = args
        save(ctx, *arguments, **kwargs)
        if not torch._C._are_functorch_transforms_active():
            return below(keyset, *arguments, **kwargs)
        # this call is an inner transform's, and the outer ones differentiate what lies below it
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(keyset, *arguments, **kwargs)

    # the base of Function that torch.func itself uses, one level of transforms at a time
    function: Any = type(
        f"{name}_derivatives",
        (torch.autograd.function._SingleLevelFunction,),
        {
            "forward": staticmethod(forward),
            # extra gradients are ignored where they are None
            "backward": staticmethod(lambda ctx, grad: (*backward(ctx, grad), None)),
            "jvp": staticmethod(lambda ctx, *tangents: jvp(ctx, *tangents[:-1])),
        },
    )

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.autograd_function import enable_single_level_autograd_function

            with enable_single_level_autograd_function():
                return function.apply(*args, (keyset, kwargs))
        if wanted(*args):
            return function.apply(*args, (keyset, kwargs))
        return below(keyset, *args, **kwargs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def register_composed(name: str, composed: Callable[..., Tensor]) -> None:
    """Where a derivative is wanted, ``realizar_torch::name`` is ``composed`` of ops that have theirs."""
    below = _below(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        values = (value for arg in args for value in (arg if isinstance(arg, list) else (arg,)))
        if torch._C._are_functorch_transforms_active() or wanted(*values):
            return composed(*args, **kwargs)
        return below(keyset, *args, **kwargs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def register_none(name: str, instead: str) -> None:
    """``realizar_torch::name`` refuses where a derivative is wanted, and says what to do ``instead``.

    Of an op without a rule PyTorch makes zeros.
    """
    below = _below(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted(*args):
            raise FormatError(f"{name} has no derivative, and an input requires one; {instead}")
        return below(keyset, *args, **kwargs)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def _below(name: str) -> Callable[..., Any]:
    """The op as it is below autograd, for a kernel that was called with ``keyset``."""
    op = getattr(torch.ops.realizar_torch, name).default

    def below(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # below the tracking of views, too: bodies reshape what they return, which is nobody's view
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return below


def wanted(*values: Any) -> bool:
    """Whether a derivative with respect to a tensor among ``values`` is being taken, in either mode."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    # outside forward mode no tensor has a tangent
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
