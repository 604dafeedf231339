"""The command line ``realizar-torch``: arguments, and how errors and interrupts end. Each verb lives in its
own file.

Nothing here imports torch, so that --help and a mistyped option answer at once.
"""

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from realizar_torch import __version__
from realizar_torch.cli.session import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_UNREAD, dying_of_interrupts
from realizar_torch.cli.streams import OutputFailed, checked_streams, complain
from realizar_torch.errors import RealizarError
from realizar_torch.formats import supported_formats

_MODEL_HELP = (
    "a GGUF file, a directory (GGUF, Hugging Face safetensors, or saved by quantize), or OWNER/NAME:QUANT on "
    "the Hugging Face Hub (default: a demo model)"
)
# verb -> module and function that run it
_VERBS = {
    "generate": ("realizar_torch.cli.answer", "generate"),
    "chat": ("realizar_torch.cli.answer", "chat"),
    "info": ("realizar_torch.cli.inspection", "info"),
    "check": ("realizar_torch.cli.inspection", "check"),
    "bench": ("realizar_torch.cli.measure", "bench"),
    "quantize": ("realizar_torch.cli.encoding", "quantize"),
    "perplexity": ("realizar_torch.cli.measure", "perplexity"),
    "doctor": ("realizar_torch.diagnosis", "run"),
}
_PROGRAM = "realizar-torch"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code: 0, 1 (``check`` or ``doctor`` found problems), 2 (an error),
    130 (interrupted), 141 (nobody reads the output any more)."""
    try:
        with checked_streams(), warnings.catch_warnings():
            args = build_parser().parse_args(argv)
            module, function = _VERBS[args.verb]
            warnings.showwarning = _print_warning
            with dying_of_interrupts():
                verb = getattr(importlib.import_module(module), function)
            return verb(args)
    except RealizarError as error:
        complain(f"{_PROGRAM}: error: {error}\n")
        return EXIT_ERROR
    except OutputFailed as failure:
        unread = isinstance(failure.__cause__, BrokenPipeError)
        complain("" if unread else f"{_PROGRAM}: error: {failure}\n")
        return EXIT_UNREAD if unread else EXIT_ERROR
    except KeyboardInterrupt:
        complain("\n")
        return EXIT_INTERRUPTED


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(_PROGRAM, description="Run GGUF models with PyTorch.")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    generate = verbs.add_parser("generate", help="continue a prompt, or answer it with --chat")
    generate.add_argument("prompt", nargs="?", help="the text; without it, standard input is read")
    generate.add_argument(
        "--chat", action="store_true", help="ask the prompt through the file's chat template"
    )
    _add_answer_options(generate, usual_count=128, temperature=0.0)

    chat = verbs.add_parser(
        "chat", help="talk to the model; /reset forgets, /exit ends, Ctrl-C stops an answer"
    )
    _add_answer_options(chat, usual_count=512, temperature=0.7)

    info = verbs.add_parser("info", help="metadata, tensors by format, memory")
    check = verbs.add_parser("check", help="tell whether a model, or each in a directory, would load")
    for verb in (info, check):
        one = verb.add_mutually_exclusive_group()
        # suppressed: without it, its default would replace what the option says
        one.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=_MODEL_HELP)
        one.add_argument("-m", "--model", help="the same, as for the other verbs")
        verb.add_argument("--json", action="store_true", help="print JSON")

    bench = verbs.add_parser(
        "bench", help="speed of prompt processing and generation, in rows as llama-bench has"
    )
    bench.add_argument(
        "-p", "--n-prompt", type=_count, default=512, help="tokens of the prompt test, 0: none (default: 512)"
    )
    bench.add_argument(
        "-n",
        "--n-gen",
        type=_count,
        default=128,
        help="tokens of the generation test, 0: none (default: 128)",
    )
    bench.add_argument(
        "-r",
        "--repetitions",
        type=_positive,
        default=5,
        help="of each test, after one that warms up (default: 5)",
    )
    _add_model_options(bench)

    quantize = verbs.add_parser(
        "quantize", help="encode a dense model and save it as a directory of safetensors"
    )
    quantize.add_argument("source", help="a GGUF file of F32, F16 or BF16, or a Hugging Face directory")
    quantize.add_argument("directory", help="where to save; must be empty or not exist yet")
    quantize.add_argument(
        "--format",
        required=True,
        metavar="FORMAT",
        help=f"{', '.join(supported_formats())}; rows that are no whole blocks of one ending in _K take "
        "another (Q5_0 for Q4_K)",
    )
    quantize.add_argument(
        "--max-shard-size", type=_bytes, default=5_000_000_000, metavar="SIZE", help="of a file, default: 5GB"
    )
    quantize.add_argument("--json", action="store_true", help="print JSON")

    perplexity = verbs.add_parser(
        "perplexity", help="perplexity of a text, measured as llama-perplexity does"
    )
    perplexity.add_argument("file", help="a UTF-8 text file")
    perplexity.add_argument(
        "-c", "--context", type=_positive, default=512, help="tokens of a chunk (default: 512)"
    )
    perplexity.add_argument("--chunks", type=_positive, help="how many chunks to score (default: all)")
    _add_model_options(perplexity)

    doctor = verbs.add_parser("doctor", help="back ends, versions, threads, and a check of the kernels here")
    doctor.add_argument(
        "-m", "--model", help="check them in the shapes and formats of this model, whose header alone is read"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", help=_MODEL_HELP)
    parser.add_argument("--device", help="cpu, cuda, cuda:1 … (default: cuda if there is one)")
    parser.add_argument("--activations", choices=("int8", "float"), default="int8", help="default: int8")
    parser.add_argument(
        "--max-seq-len", type=_positive, help="positions of the KV cache (default: up to 4096)"
    )
    parser.add_argument(
        "--kv-dtype", choices=("fp8", "int8", "float16", "bfloat16", "float32"),
        help="elements of the KV cache; fp8 and int8 halve its memory (default: as the model computes)",
    )  # fmt: skip
    parser.add_argument("-t", "--threads", type=_positive, help="CPU threads (default: torch's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_answer_options(parser: argparse.ArgumentParser, *, usual_count: int, temperature: float) -> None:
    _add_model_options(parser)
    add = parser.add_argument
    add("-n", "--max-new-tokens", type=_count, help=f"default: {usual_count}, or what the cache still holds")
    add("--system", help="a system message for the chat template")
    add("--temperature", type=float, default=temperature, help=f"0: greedy; default: {temperature:g}")
    add("--top-k", type=int, default=0, help="sample among the K likeliest tokens; 0: off")
    add("--top-p", type=float, default=1.0, help="sample among the likeliest tokens that hold P; 1: off")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than P times the likeliest; 0: off")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: avoid tokens seen before")
    add("--seed", type=_seed, help="makes sampling repeatable, 0 to 2**63 - 1")
    add("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be given repeatedly")


def _seed(text: str) -> int:
    seed = _count(text)
    if seed >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is outside 0 to 2**63 - 1")
    return seed


def _count(text: str) -> int:
    return _whole(text, 0)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _bytes(text: str) -> int:
    number, unit = (text[:-2], text[-2:].upper()) if text[-2:].upper() in _UNITS else (text, "")
    try:
        return _whole(number, 1) * _UNITS.get(unit, 1)
    except argparse.ArgumentTypeError:
        expected = f"a number of bytes, or one with {', '.join(_UNITS)} behind it"
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected {expected}") from None


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        # argparse would name this function
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is {'not positive' if least else 'negative'}")
    return value
