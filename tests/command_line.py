"""The command line called in-process: what the tests of all verbs share."""

from pathlib import Path

import pytest

from realizar_torch import cli


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Runs one verb: exit code, standard output, standard error."""
    code = cli.main([str(argument) for argument in argv])
    out, err = capsys.readouterr()
    return code, out, err


def exact(model: Path, *options: object) -> tuple[object, ...]:
    """Options that make an answer equal to the reference's."""
    return ("--model", model, "--activations", "float", *options)


def schema(value: object) -> object:
    """The types of a JSON value; a list is as its first element."""
    if isinstance(value, dict):
        return {key: schema(item) for key, item in value.items()}
    if isinstance(value, list):
        return [schema(item) for item in value[:1]]
    return type(value).__name__
