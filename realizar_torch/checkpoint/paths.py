"""Paths as callers give them."""

import os
import re
from pathlib import Path

from realizar_torch.checkpoint.gguf_errors import broken, shown
from realizar_torch.errors import FormatError

WHAT_TO_GIVE = "Give the path of a GGUF file, of any shard, or of a directory that holds one model."
_URL = re.compile(r"\w+://")


def given_path(value: object) -> Path:
    """The path, ``~`` being the user's home.

    FormatError for what is none and for a URL; GGUFError where the system cannot say whether it exists.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise FormatError(f"the path is {value!r:.80}; expected a str or a Path that names a model")
    if _URL.match(text):
        raise FormatError(
            f"{shown(text)} is a URL, which is not fetched: download the file and give its path, or name it "
            "as OWNER/NAME:QUANT if it is on the Hugging Face Hub"
        )
    path = Path(text)
    try:
        path = path.expanduser()
        path.exists()
    except RuntimeError:
        # no such user: a name that begins so
        return path
    except OSError as error:
        raise broken(shown(text), "path", f"'{error.strerror}'", "a readable file", WHAT_TO_GIVE) from error
    return path
