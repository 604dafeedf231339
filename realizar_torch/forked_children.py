"""Forked children compute with one thread: torch's OpenMP threads do not survive a fork, and an op that
wakes them waits for ever."""

import os
import sys


def keep_them_to_one_thread() -> None:
    """Holds from here on, for children that have torch; it neither imports torch nor changes this process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_one_thread)


def _one_thread() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
