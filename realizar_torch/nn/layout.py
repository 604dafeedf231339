"""PackedModule: a module whose packed weight may stand in a device layout instead of the file's bytes."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from realizar_torch import packing
from realizar_torch.errors import FormatError
from realizar_torch.nn import packed


class PackedModule(nn.Module):
    """Holds ``weight``, canonical bytes, or after ``adopt`` the non-persistent buffer ``packed``.

    State dicts hold canonical bytes in either case: saving unpacks, loading packs.
    """

    fmt: str
    layout: str = "ggml"
    weight: nn.Parameter
    packed: torch.Tensor

    @property
    def stored(self) -> torch.Tensor:
        """The weight's bytes ``uint8 [rows, row_bytes]`` in ``layout``."""
        if self.layout == "ggml":
            return self.weight
        if "weight" in self._parameters or "weight" in self.__dict__:
            raise FormatError(
                f"a weight was set on a {type(self).__name__} that is packed as {self.layout!r}; "
                "call rt.unpack before setting weights, or load them with load_state_dict"
            )
        return self.packed

    def adopt(self, stored: torch.Tensor, layout: str) -> None:
        """Replaces the weight by ``stored``, its bytes in ``layout`` (a Parameter where that is "ggml")."""
        for name in ("weight", "packed"):
            if hasattr(self, name):
                delattr(self, name)
        if layout == "ggml":
            self.weight = stored if isinstance(stored, nn.Parameter) else nn.Parameter(stored, False)
        else:
            self.register_buffer("packed", stored, persistent=False)
        self.layout = layout

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed.save_format(destination, prefix, self.fmt)
        if self.layout != "ggml":
            destination[prefix + "weight"] = _canonical(self.packed, self.fmt, self.layout)

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
        packed.check_state(state_dict, prefix, local_metadata, self.fmt)
        key = prefix + "weight"
        if self.layout != "ggml":
            blocks = state_dict.get(key)
            if blocks is None:
                missing_keys.append(key)
            elif blocks.shape != self.packed.shape:
                error_msgs.append(f"{key} is {list(blocks.shape)}, expected {list(self.packed.shape)}")
            else:
                with torch.no_grad():
                    self.packed.copy_(packing.pack(blocks, self.fmt, self.layout))
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _canonical(stored: torch.Tensor, fmt: str, layout: str) -> torch.Tensor:
    """The file's bytes of ``stored``; modules that share it get the same tensor as long as one is alive."""
    version, reference = getattr(stored, "_canonical", (None, None))
    blocks = None if reference is None or version != stored._version else reference()
    if blocks is None:
        blocks = packing.unpack(stored, fmt, layout)
        stored._canonical = (stored._version, weakref.ref(blocks))  # type: ignore[attr-defined]
    return blocks
