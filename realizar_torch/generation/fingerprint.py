"""Fingerprint: whether a model still is what it was when somebody looked at all of it."""

import operator
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks


class Fingerprint:
    """The modules, attributes, hooks and tensors' places of a model, its classes' forwards, and the writes to
    its float buffers.

    Attributes are compared by identity: an equal one in the place of another counts as a change, and one that
    is changed within itself does not, but for modules' parameters, buffers, children and forward hooks. Nor
    do parameters' values count, or writes through ``data``, of which torch does not know. ``apart``: the
    attribute of the model that may own this, and is left out.
    """

    def __init__(self, model: nn.Module, apart: str):
        self._apart = apart
        self._objects, self._places = self._read(model)

    def matches(self, model: nn.Module) -> bool:
        objects, places = self._read(model)
        return (
            len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and places == self._places
        )

    def _read(self, model: nn.Module) -> tuple[list[Any], list[tuple]]:
        """From the modules' own dictionaries, as every request asks: ``parameters()`` takes longer."""
        objects: list[Any] = [*hooks._global_forward_hooks, *hooks._global_forward_pre_hooks]
        objects += [value for name, value in model.__dict__.items() if name != self._apart]
        places: list[tuple] = []
        pending: list[nn.Module | None] = [model]
        # a module may be held twice, or even hold what holds it
        seen: set[nn.Module] = set()
        while pending:
            module = pending.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            own = module.__dict__
            kind = type(module)
            # a scripted module's class has none
            objects += (kind, getattr(kind, "forward", None))
            if module is not model:
                objects += own.values()
            for held in (own["_forward_hooks"], own["_forward_pre_hooks"]):
                if held:
                    objects += held
            if children := own["_modules"]:
                objects += children.values()
                pending += children.values()
            if parameters := own["_parameters"]:
                # not the tensors: one that was replaced would be kept
                places += [
                    (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous())
                    for tensor in parameters.values()
                    if tensor is not None
                ]
            for tensor in own["_buffers"].values():
                if tensor is not None:
                    places.append((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()))
                    if tensor.is_floating_point() and not tensor.is_inference():
                        # a step has a table of the angles that it had frequencies for
                        places.append((tensor._version,))
        return objects, places
