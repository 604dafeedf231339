"""Small tokenizers for tests, over the vocabularies of the committed goldens."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from realizar_torch.checkpoint.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"tokenizer_{name}.json").read_text())


PRE = load("pre")
SENTENCE_PIECE = load("sentence_piece")
VECTORS = load("vectors")


def tiny_bpe(**changes: Any) -> Tokenizer:
    """Over the golden byte-level vocabulary; `bos_token_id=3` replaces that key, None removes one."""
    metadata = PRE["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


def tiny_spm(**changes: Any) -> Tokenizer:
    metadata = SENTENCE_PIECE["metadata"]
    metadata = metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


plain_bpe, plain_spm = cache(tiny_bpe), cache(tiny_spm)
