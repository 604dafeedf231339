"""The verbs ``generate`` and ``chat``: text streamed as it comes, then one line of numbers on standard
error."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from realizar_torch.cli.session import EXIT_INTERRUPTED, Session, open_session
from realizar_torch.cli.streams import check_input, print_json, read_line, read_text
from realizar_torch.errors import FormatError, RealizarError, UnsupportedArchitectureError

# imported where they are used: the session times the import of torch
if TYPE_CHECKING:
    from realizar_torch.generation.text import Prompt, TextStream

Messages = list[dict[str, str]]

GENERATE_COUNT, CHAT_COUNT = 128, 512


def generate(args: argparse.Namespace) -> int:
    """Continues the prompt (or answers it, with --chat or --system) once."""
    options = _generation_options(args)
    text = args.prompt if args.prompt is not None else _read_standard_input()
    prompt: Prompt = text
    if args.chat or args.system is not None:
        prompt = [*_system_messages(args.system), {"role": "user", "content": text}]
    session = open_session(args)
    stream = _start(session, prompt, args, options, GENERATE_COUNT)
    session.announce_compiling()
    answer = _print_pieces(stream, quiet=args.json)
    if args.json:
        print_json(_answer_record(session, stream, answer))
    else:
        print(flush=True)
        print(_summary(session, stream), file=sys.stderr)
    return 0 if stream.stop_reason else EXIT_INTERRUPTED


def chat(args: argparse.Namespace) -> int:
    """A conversation on standard input: one message a line. With --json, one JSON object per answer.

    What a turn has in common with the one before is not computed again, in a conversation after /reset
    neither. A message that cannot be answered is dropped, and the conversation goes on.
    """
    check_input()
    options = _generation_options(args)
    session = open_session(args)
    if session.tokenizer.chat_template is None:
        raise UnsupportedArchitectureError(
            f"{session.path} has no chat template, as is usual for base models: continue a text with generate"
        )
    options["prefix_cache"] = _prefix_cache(session)
    _check_options(session, args, options)
    messages: Messages = _system_messages(args.system)
    session.announce_compiling()
    while (line := _ask(args.json)) is not None:
        if line == "/reset":
            messages = _system_messages(args.system)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = _start(session, messages, args, options, CHAT_COUNT)
            answer = _print_pieces(stream, quiet=args.json)
        except RealizarError as error:
            messages.pop()
            print(f"error: {error}; the message was dropped (/reset starts anew)", file=sys.stderr)
            continue
        if stream.token_ids:
            messages.append({"role": "assistant", "content": answer})
        else:
            # interrupted before the first word: as if nothing had been asked
            messages.pop()
        if args.json:
            print_json(_answer_record(session, stream, answer))
        else:
            print(flush=True)
            print(_rates(stream), file=sys.stderr)
    return 0


def _prefix_cache(session: Session) -> Any:
    from realizar_torch.generation.prefix import PrefixCache

    return PrefixCache(session.model)


def _check_options(session: Session, args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Refuses, before the first message, what no message could be answered with."""
    import torch

    from realizar_torch.generation.request import make_request

    count = args.max_new_tokens or 0
    make_request(
        session.model, torch.tensor([[0]]), tokenizer=session.tokenizer, max_new_tokens=count, **options
    )


def _ask(quiet: bool) -> str | None:
    """The next line without blanks around it; None at the end of input, at /exit and at an interrupt."""
    try:
        line = read_line("" if quiet else "> ").strip()
    except (EOFError, KeyboardInterrupt):
        if not quiet:
            print()
        return None
    return None if line == "/exit" else line


def _read_standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise FormatError("no prompt: give it as an argument or on standard input")
    return read_text().removesuffix("\n")


def _system_messages(system: str | None) -> Messages:
    return [] if system is None else [{"role": "system", "content": system}]


def _generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``stream``. A temperature of 0 is greedy, where the filters would have no effect."""
    options: dict[str, Any] = {"repetition_penalty": args.repetition_penalty, "stop_strings": args.stop}
    filters = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
    if args.temperature != 0:
        options |= {"do_sample": True, "temperature": args.temperature, **filters}
    elif filters != {"top_k": 0, "top_p": 1.0, "min_p": 0.0}:
        raise FormatError(
            "--top-k, --top-p and --min-p choose among sampled tokens: give --temperature above 0"
        )
    return options


def _start(
    session: Session, prompt: "Prompt", args: argparse.Namespace, options: dict[str, Any], usual_count: int
) -> "TextStream":
    """Starts an answer of ``--max-new-tokens``; without it, of the usual count or what the cache still
    holds."""
    import torch

    from realizar_torch.generation.text import encode_prompt, stream

    if args.seed is not None and options.get("do_sample"):
        options = options | {"generator": torch.Generator(session.model.device).manual_seed(args.seed)}
    free = session.model.max_seq_len - len(encode_prompt(session.tokenizer, prompt))
    count = min(usual_count, max(free, 1)) if args.max_new_tokens is None else args.max_new_tokens
    return stream(session.model, session.tokenizer, prompt, max_new_tokens=count, **options)


def _print_pieces(stream: "TextStream", quiet: bool) -> str:
    """Prints the answer as it comes and returns it; an interrupt ends the answer, not the program, and an
    error the line."""
    pieces = []
    try:
        for piece in stream:
            pieces.append(piece)
            if not quiet:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
    except RealizarError:
        if pieces and not quiet:
            print(flush=True)
        raise
    return "".join(pieces)


def _answer_record(session: Session, stream: "TextStream", answer: str) -> dict[str, Any]:
    return {
        "model": str(session.path),
        "text": answer,
        "token_ids": stream.token_ids,
        "stop_reason": stream.stop_reason or "interrupted",
        "metrics": stream.metrics.as_dict(),
        "import_seconds": session.import_seconds,
        "load_seconds": session.load_seconds,
    }


def _summary(session: Session, stream: "TextStream") -> str:
    times = f"import {session.import_seconds:.2f} s, load {session.load_seconds:.2f} s"
    return f"[{times}, {_rates(stream).removeprefix('[')}"


def _rates(stream: "TextStream") -> str:
    metrics = stream.metrics
    if metrics.time_to_first_token is None:
        return "[no token]"
    rate = metrics.tokens_per_second
    speed = "" if rate is None else f", {rate:.1f} tok/s"
    kept = f" ({metrics.reused_tokens} kept)" if metrics.reused_tokens else ""
    count = f"{metrics.prompt_tokens} prompt{kept} + {metrics.new_tokens} new tokens"
    reason = stream.stop_reason or "interrupted"
    return f"[first token {metrics.time_to_first_token:.2f} s{speed}; {count}; {reason}]"
