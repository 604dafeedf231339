"""The verbs ``bench`` and ``perplexity``: speed in llama-bench's rows, and quality by llama-perplexity's
rule."""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realizar_torch import __version__
from realizar_torch.cli.bandwidth import read_bandwidth
from realizar_torch.cli.session import Session, open_session
from realizar_torch.cli.streams import print_json
from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.metrics import mean_and_deviation


def bench(args: argparse.Namespace) -> int:
    """Measures a prompt of ``-p`` tokens and the generation of ``-n`` tokens, each ``-r`` times after a
    warm-up."""
    if not args.n_prompt and not args.n_gen:
        raise FormatError("nothing to measure: --n-prompt and --n-gen are both 0")
    session = open_session(args)
    longest = max(args.n_prompt, args.n_gen + 1)
    if longest > session.model.max_seq_len:
        raise CacheFullError(
            f"the tests need {longest} positions, the KV cache has "
            f"{session.model.max_seq_len}; use --max-seq-len"
        )
    common = _machine_record(session, args)
    session.announce_compiling()
    records = []
    if args.n_prompt:
        records.append(
            common | _record(args.n_prompt, 0, _times(_prompt_test(session.model, args.n_prompt), args))
        )
    if args.n_gen:
        records.append(
            common
            | _record(0, args.n_gen, _times(_generation_test(session.model, args.n_gen), args))
            | _memory_record(session.model, args.n_gen)
        )
    if args.json:
        print_json(records)
    else:
        _print_table(records)
    return 0


def _prompt_test(model: Any, count: int) -> Callable[[], float]:
    import torch

    from realizar_torch.generation.step import new_state, prefill

    ids = torch.randint(model.config.vocab_size, (1, count), device=model.device)

    def run() -> float:
        state = new_state(model, 1, count)
        return _seconds(lambda: prefill(model, ids, None, state), model.device)

    return run


def _generation_test(model: Any, count: int) -> Callable[[], float]:
    """Steps from an empty context, like llama-bench; the one token of prefill is not timed."""
    import torch

    from realizar_torch.generation.step import decode_step, new_state, prefill

    ids = torch.randint(model.config.vocab_size, (count + 1, 1), device=model.device)

    def run() -> float:
        state = new_state(model, 1, count + 1)
        with torch.inference_mode():
            prefill(model, ids[:1], None, state)

        def steps() -> None:
            for token in ids[1:]:
                decode_step(model, token, state)

        return _seconds(steps, model.device)

    return run


def _seconds(work: Callable[[], object], device: Any) -> float:
    import torch

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        work()
    synchronize()
    return time.perf_counter() - started


def _times(test: Callable[[], float], args: argparse.Namespace) -> list[float]:
    test()
    return [test() for _ in range(args.repetitions)]


def _machine_record(session: Session, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from realizar_torch.cli.inspection import describe
    from realizar_torch.models.sources import open_source

    file = describe(open_source(session.path))
    return {
        "model_filename": str(session.path),
        "model_type": f"{file['architecture']} {file['formats'][0]['format']}",
        "model_size": file["memory"]["weights"],
        "model_n_params": file["parameters"],
        "backend": session.model.device.type,
        "activations": args.activations,
        "n_threads": torch.get_num_threads(),
        "cpu_info": platform.processor() or platform.machine(),
        "versions": {"realizar_torch": __version__, "torch": torch.__version__},
    }


def _record(n_prompt: int, n_gen: int, seconds: list[float]) -> dict[str, Any]:
    """The measurements under llama-bench's names; ``ts`` is tokens per second."""
    rates = [(n_prompt or n_gen) / second for second in seconds]
    mean_seconds, deviation_seconds = mean_and_deviation(seconds)
    mean_rate, deviation_rate = mean_and_deviation(rates)
    return {
        "test": f"pp{n_prompt}" if n_prompt else f"tg{n_gen}",
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "avg_ns": round(1e9 * mean_seconds),
        "stddev_ns": round(1e9 * deviation_seconds),
        "avg_ts": mean_rate,
        "stddev_ts": deviation_rate,
        "samples_ns": [round(1e9 * second) for second in seconds],
        "samples_ts": rates,
    }


def _memory_record(model: Any, n_gen: int) -> dict[str, float]:
    """What a generation test reads, in bytes, and how fast the memory is, in GB/s."""
    from realizar_torch.generation.step_bytes import decode_bytes

    return {"read_bytes": decode_bytes(model, 1, 1, n_gen), "bandwidth": read_bandwidth(model.device)}


def _speed_of_memory(record: dict[str, Any]) -> str:
    """GB/s of a generation test and its share of the bandwidth."""
    if "bandwidth" not in record:
        return ""
    speed = record["read_bytes"] / record["avg_ns"]
    return f"{speed:.1f} ({speed / record['bandwidth']:.0%} of {record['bandwidth']:.1f})"


def _print_table(records: list[dict[str, Any]]) -> None:
    """llama-bench's Markdown table, with columns for the numerics and for the memory that is read."""
    header = ("model", "size", "params", "backend", "activations", "threads", "test", "t/s", "GB/s")
    rows = [
        (
            record["model_type"],
            f"{record['model_size'] / (1 << 20):.2f} MiB",
            f"{record['model_n_params'] / 1e6:.2f} M",
            record["backend"],
            record["activations"],
            str(record["n_threads"]),
            record["test"],
            f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}",
            _speed_of_memory(record),
        )
        for record in records
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, tuple("-" * (width - 1) + ":" for width in widths), *rows):
        print("| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) + " |")


def perplexity(args: argparse.Namespace) -> int:
    """Scores a text; prints the running estimate after each chunk, then the result."""
    try:
        text = Path(args.file).read_text(encoding="utf-8")
    except OSError as error:
        raise FormatError(f"{args.file} cannot be read: {error.strerror}; give a text file") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{args.file} is no UTF-8 text: {error}") from None
    session = open_session(args)
    session.announce_compiling()
    from realizar_torch import evaluation

    estimates: list[float] = []

    def show(result: evaluation.Perplexity) -> None:
        estimates.append(result.value)
        if not args.json:
            print(f"[{len(estimates)}]{result.value:.4f}", end=" ", flush=True)

    result = evaluation.perplexity(
        session.model, session.tokenizer, text, context=args.context, chunks=args.chunks, progress=show
    )
    if args.json:
        record = {
            "model": str(session.path),
            "file": args.file,
            "activations": args.activations,
            "context": args.context,
            "chunks": len(estimates),
            "scored_tokens": result.scored_tokens,
            "negative_log_likelihood": sum(result.losses),
            "estimates": estimates,
            "perplexity": result.value,
        }
        print_json(record)
    else:
        size = f"{result.scored_tokens} tokens ({len(estimates)} chunks of {args.context})"
        print(f"\nperplexity {result.value:.4f} over {size}")
    return 0
