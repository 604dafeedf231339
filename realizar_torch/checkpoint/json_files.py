"""JSON files of a model directory: read with a size limit, one object each, complaints in our own words."""

import json
from pathlib import Path
from typing import Any

from realizar_torch.checkpoint.gguf_errors import damaged, shown, shown_path

# tokenizers are the largest of them; a hostile file cannot make us read more
_MAX_BYTES = 1 << 28


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; CheckpointError if it is missing, too large or no UTF-8."""
    where = shown_path(path)
    try:
        if not path.is_file():
            raise damaged(where, "path", "no such file", "a readable file")
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise damaged(where, "size", f"{size} bytes", f"at most {_MAX_BYTES}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise damaged(where, "path", f"'{error.strerror}'", "a readable file", "") from error
    except UnicodeDecodeError as error:
        raise damaged(where, f"byte {error.start}", f"no UTF-8 ({error.reason})", "text") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError if there is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = f"{shown(text[:40])} ({error})"
        raise damaged(shown_path(path), "text", found, "JSON") from None
    if not isinstance(value, dict):
        found = f"a {type(value).__name__}"
        raise damaged(shown_path(path), "value", found, "one JSON object")
    return value
