"""Which weight takes which format: patterns on names, of which the first that matches decides."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from realizar_torch.errors import FormatError
from realizar_torch.formats import BlockFormat, get_packed_format

_MAX_NAMES_SHOWN = 4


def choose_formats(plan: Mapping[str, str], names: Iterable[str]) -> dict[str, BlockFormat]:
    """Name -> format, for the names that a pattern (fnmatch, case counts) of ``plan`` matches.

    FormatError for an unknown format and for a pattern that matches none of the names.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise FormatError(f"the plan is {plan!r:.80}; expected a format or a dict of patterns and formats")
    formats = {pattern: get_packed_format(fmt) for pattern, fmt in plan.items()}
    names = list(names)
    check_patterns(formats, names)
    chosen = {}
    for name in names:
        matching = (fmt for pattern, fmt in formats.items() if fnmatchcase(name, pattern))
        if (fmt := next(matching, None)) is not None:
            chosen[name] = fmt
    return chosen


def several_patterns(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """The patterns of the argument ``name``, which may be one string. FormatError for what is no string."""
    patterns = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise FormatError(f"{name} is {given!r:.80}; expected a name or pattern, or a sequence of them")
    return patterns


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    """FormatError for a pattern that matches none of the names."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            listed = ", ".join(names[:_MAX_NAMES_SHOWN]) or "none"
            raise FormatError(f"the pattern {pattern!r} matches nothing; names are like {listed}")
