"""Where this package keeps files of its own: the user's cache directory as the system names it."""

import os
import sys
from pathlib import Path


def user_cache() -> Path | None:
    """The package's folder there, not necessarily existing; None for a user without a home.

    An empty or relative XDG_CACHE_HOME counts as unset, as its specification says.
    """
    try:
        if sys.platform == "win32":
            root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            root = Path.home() / "Library" / "Caches"
        else:
            named = Path(os.environ.get("XDG_CACHE_HOME") or "")
            root = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "realizar_torch" if root.is_absolute() else None
