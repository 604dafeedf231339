"""Standard streams as shells leave them: closed, full, left by their reader, or of an encoding that lacks
characters."""

import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from realizar_torch.errors import FormatError


class OutputFailed(Exception):
    """An output stream takes no more; its cause says why. No RealizarError: nothing goes on after it."""


class _Output:
    """A stream whose failures are told from those of files."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        with self._failing():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._failing():
            self._stream.flush()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OutputFailed(f"{self._name} cannot be written: {error.strerror}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def checked_streams() -> Iterator[None]:
    """At its end all output has arrived, or OutputFailed is raised; FormatError without standard output.

    Characters that standard output cannot show are written as escapes, as Python does on standard error.
    Bytes of standard input that are no text become lone surrogates, which the tokenizer refuses.
    """
    if sys.stderr is None:
        # print would take standard output for a stream that is None
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")
    if sys.stdout is None:
        raise FormatError("standard output is closed; give it somewhere to go, /dev/null for nowhere")
    _replace_strict(sys.stdout, "backslashreplace")
    _replace_strict(sys.stdin, "surrogateescape")
    out, err = _Output(sys.stdout, "standard output"), _Output(sys.stderr, "standard error")
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        try:
            yield
        finally:
            out.flush()


def _replace_strict(stream: TextIO | None, errors: str) -> None:
    # in a C locale Python's output escapes surrogates, and fails for all else
    if isinstance(stream, io.TextIOWrapper) and stream.errors in {"strict", "surrogateescape"} - {errors}:
        stream.reconfigure(errors=errors)


def complain(message: str) -> None:
    """The last words of a run, on standard error if that takes them.

    What no stream took goes nowhere: the interpreter would try again while closing, and complain itself.
    """
    for stream, text in ((sys.stderr, message), (sys.stdout, "")):
        try:
            print(text, end="", file=stream, flush=True)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(record: Any) -> None:
    """One line of JSON, in ASCII where standard output cannot show every character. NaN and infinities, for
    which JSON has no word, are null."""
    record = _with_finite_numbers(record)
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record, allow_nan=False)
    print(text, flush=True)


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_finite_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_input() -> None:
    """FormatError where there is no standard input."""
    if sys.stdin is None:
        raise FormatError("standard input is closed; expected text from a terminal, a pipe or a file")


def read_text() -> str:
    """All of standard input. FormatError where it cannot be read."""
    with _reading():
        return sys.stdin.read()


def read_line(prompt: str) -> str:
    """The next line of standard input, as ``input`` reads it. FormatError where it cannot be read."""
    with _reading():
        return input(prompt)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FormatError(f"standard input cannot be read: {error.strerror or error}") from error
