"""The format of a saved model: names of its files, its version, and how its tensors are called in GGUF."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.checkpoint.tokenizer_json import JsonTokenizer
from realizar_torch.models.tensors import (
    LAYER_TENSORS,
    LONG_DIVISORS,
    MODEL_TENSORS,
    ROPE_DIVISORS,
    SHORT_DIVISORS,
)

FORMAT, VERSION = "realizar_torch", 1
CONFIG_FILE, TOKENIZER_FILE = "realizar.json", "realizar_tokenizer.json"
# Each safetensors file tells the formats of its tensors too: bytes do not tell Q4_0 from Q4_K.
FORMATS_KEY = "realizar_torch.formats"
_STATE_NAME = re.compile(r"(?:layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class Origin:
    """What a model was made from, beside its weights. constants: the tensors of rotary divisors, float32.
    foreign_tokenizer: the class of the tokenizer, where it is the caller's own and no metadata make it again.
    """

    metadata: Mapping[str, Any]
    constants: Mapping[str, Tensor]
    foreign_tokenizer: str | None = None

    @classmethod
    def of(cls, source: ModelSource, tokenizer: Any = None) -> "Origin":
        """Of an open source, whose metadata arrays stay in its mapping. tokenizer: in place of its own."""
        names = (ROPE_DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
        constants = {name: source.read(name).float().clone() for name in names if name in source.tensors}
        if tokenizer is None:
            return cls(dict(source.metadata), constants)
        metadata = {k: v for k, v in source.metadata.items() if not k.startswith("tokenizer.")}
        # which many files tell by their list of tokens alone
        table = source.tensors[f"{MODEL_TENSORS['embed_tokens']}.weight"]
        metadata[f"{source.arch}.vocab_size"] = table.shape[0]
        # a subclass may compute something else
        if type(tokenizer) in (Tokenizer, JsonTokenizer):
            return cls(metadata | tokenizer.metadata, constants)
        return cls(metadata, constants, type(tokenizer).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        # nobody changes it, so that copies of a model can share it
        return self


def gguf_name(state_name: str) -> str | None:
    """The GGUF name of a state dict entry of a Transformer; None for one that GGUF has no word for."""
    match = _STATE_NAME.fullmatch(state_name)
    if match is None:
        return None
    names = MODEL_TENSORS if match["layer"] is None else LAYER_TENSORS
    if match["module"] not in names:
        return None
    prefix = "" if match["layer"] is None else f"blk.{match['layer']}."
    return f"{prefix}{names[match['module']]}.{match['kind']}"
