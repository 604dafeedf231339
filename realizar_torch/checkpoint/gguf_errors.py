"""One shape for every complaint about a model file: place, what was found, what was expected, what to do."""

from pathlib import Path

from realizar_torch.errors import CheckpointError, GGUFError

DAMAGED = "The file is incomplete or damaged: download or convert it again."


def broken(path: str, where: str, found: str, expected: str, advice: str = DAMAGED) -> GGUFError:
    """The error to raise for the file at ``path``; quote texts of the file by :func:`shown`."""
    return GGUFError(complaint(path, where, found, expected, advice))


def damaged(path: str, where: str, found: str, expected: str, advice: str = DAMAGED) -> CheckpointError:
    """The same for a file or directory of another kind."""
    return CheckpointError(complaint(path, where, found, expected, advice))


def complaint(path: str, where: str, found: str, expected: str, advice: str = DAMAGED) -> str:
    """The same as a text, for an error of another class."""
    return f"{path}: {where}: found {found}, expected {expected}. {advice}"


def shown(text: str | bytes, limit: int = 80) -> str:
    """Text from a file, quoted, control characters escaped, cut to ``limit`` characters: safe to print."""
    if len(text) > limit:
        return f"{text[:limit]!r}… ({len(text)} long)"
    return repr(text)


def shown_path(path: Path) -> str:
    """The path as it is, or quoted and escaped if it holds anything unprintable."""
    text = str(path)
    return text if text.isprintable() else repr(text)
