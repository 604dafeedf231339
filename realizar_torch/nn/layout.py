"""PackedModule: a module whose packed weight may stand in a device layout instead of the file's bytes."""

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from realizar_torch import packing
from realizar_torch.errors import FormatError
from realizar_torch.nn import packed


class _Entry:
    """The state dict entry that last took a packed tensor's bytes; who shares the tensor shares this."""

    def __init__(self) -> None:
        self._key = ""
        self._packed: Callable[[], Tensor | None] = lambda: None
        self._blocks: Callable[[], Tensor | None] = lambda: None

    def __reduce__(self) -> tuple[type["_Entry"], tuple[()]]:
        # copies and pickles start anew
        return type(self), ()

    def save(self, module: "PackedModule", destination: MutableMapping[str, Tensor], key: str) -> None:
        """Puts canonical bytes at ``key``: those another module put into this state dict, or new ones."""
        blocks = self._blocks()
        if blocks is None or self._packed() is not module.packed or destination.get(self._key) is not blocks:
            blocks = packing.unpack(module.packed, module.fmt, module.layout)
            self._key, self._packed, self._blocks = key, weakref.ref(module.packed), weakref.ref(blocks)
        destination[key] = blocks


class PackedModule(nn.Module):
    """Holds ``weight``, canonical bytes, or after ``adopt`` the non-persistent buffer ``packed``.

    State dicts hold canonical bytes in either case: saving unpacks, loading packs.
    """

    fmt: str
    layout: str
    weight: nn.Parameter
    packed: Tensor
    _entry: _Entry

    def __init__(self) -> None:
        super().__init__()
        self.layout = "ggml"

    @property
    def columns(self) -> int:
        """Weights in a row, without padding."""
        raise NotImplementedError

    @property
    def stored(self) -> Tensor:
        """The weight's bytes ``uint8 [rows, row_bytes]`` in ``layout``."""
        return stored_by(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weight, and of a bias, as stored."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def extra_repr(self) -> str:
        return f"fmt={self.fmt}, layout={self.layout}, bytes={self.memory_bytes}"

    def adopt(self, stored: Tensor, layout: str) -> None:
        """Replaces the weight by ``stored``, its bytes in ``layout`` (a Parameter where that is "ggml")."""
        for name in ("weight", "packed"):
            if hasattr(self, name):
                delattr(self, name)
        if layout == "ggml":
            self.weight = stored if isinstance(stored, nn.Parameter) else nn.Parameter(stored, False)
        else:
            self.register_buffer("packed", stored, persistent=False)
            self._entry = _Entry()
        self.layout = layout

    def share(self, twin: "PackedModule") -> None:
        """Replaces the weight by that of ``twin``, which goes on holding it."""
        self.adopt(twin.stored, twin.layout)
        if self.layout != "ggml":
            self._entry = twin._entry

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        packed.check_name(name, param)
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed.save_form(destination, prefix, self.fmt, self.columns)
        if self.layout != "ggml":
            self._entry.save(self, destination, prefix + "weight")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        packed.check_state(state_dict, prefix, local_metadata, self.fmt, self.columns)
        key = prefix + "weight"
        if self.layout != "ggml":
            assign = local_metadata.get("assign_to_params_buffers", False)
            blocks = state_dict.get(key)
            if blocks is None:
                missing_keys.append(key)
            elif blocks.shape != self.packed.shape:
                error_msgs.append(f"{key} is {list(blocks.shape)}, expected {list(self.packed.shape)}")
            elif assign:
                self.packed = packing.pack(blocks.detach(), self.fmt, self.layout)
            elif self.packed.is_meta:
                error_msgs.append(f"{key}: the packed weight is on meta and has no memory; pass assign=True")
            else:
                with torch.no_grad():
                    self.packed.copy_(packing.pack(blocks, self.fmt, self.layout))
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def stored_by(module: PackedModule) -> Tensor:
    """``module.stored`` for what is compiled, whose every call would look a property up in the class."""
    if module.layout == "ggml":
        return module.weight
    if "weight" in module._parameters or "weight" in module.__dict__:
        raise FormatError(
            f"a weight was set on a {type(module).__name__} that is packed as {module.layout!r}; "
            "call rt.unpack before setting weights, or load them with load_state_dict"
        )
    return module.packed
