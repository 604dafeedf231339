"""Tokens per second of transformers' generate with packed and with dense weights, and of our own loop.

    python bench/hf_generate.py [--model 8b] [--device cuda] [--new 128] [--seconds 180] [--out FILE]

Random weights in the shapes and formats of Llama 3 Q4_K_M files, made on the device. transformers runs with a
static cache and, on a GPU, compiled as generate does by itself. tok/s is what the last ``--new`` tokens of a
longer call take more than a call without them; "whole" counts prompt, graph recording and all.
Before a speed counts, the logits of the timed model's own tokens are compared with the dense model's.
No case is begun after ``--seconds``; what was measured is in FILE after every case.
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from synthetic import SHAPES, SyntheticFile, load_synthetic

import realizar_torch as rt
from realizar_torch.checkpoint.gguf_header import TensorInfo
from realizar_torch.formats import get_format
from realizar_torch.hf.loading import load_model

PROMPT, FIRST, RUNS = 128, 17, 3
# rms of the difference of logits over the rms of the dense model's: two roundings to bf16 at every operation
# on either side; int8 activations of 7 products per layer
TOLERANCE = {"dense": 0.06, "float": 0.06, "int8": 0.15}


class Source:
    """The synthetic model as ``load_model`` wants a file; ``decoded``: its matrices as bf16."""

    arch = "llama"

    def __init__(self, name: str, device: str, decoded: bool) -> None:
        self._file = SyntheticFile(SHAPES[name], device)
        self.path, self.shards, self.metadata = self._file.path, (self._file.path,), self._file.metadata
        packed = self._file.tensors
        self.tensors = {key: _decoded(info) for key, info in packed.items()} if decoded else packed

    def read(self, name: str) -> torch.Tensor:
        weight, info = self._file.read(name), self._file.tensors[name]
        if info.fmt == self.tensors[name].fmt:
            return weight
        return rt.ops.dequantize(weight, info.fmt.name, info.shape[1], dtype=torch.bfloat16)

    def release(self, name: str) -> None:
        """Nothing is kept."""


def _decoded(info: TensorInfo) -> TensorInfo:
    return replace(info, fmt=get_format("BF16")) if info.fmt.packed else info


class Bench:
    """One device, one prompt, one dense model to compare with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(3)
        vocabulary = SHAPES[options.model].vocab
        self.ids = torch.randint(0, vocabulary, (1, PROMPT), generator=generator).to(self.device)
        self.dense = self.hf_model(decoded=True)
        self.records: list[dict[str, Any]] = []

    def hf_model(self, *, decoded: bool, activations: str = "float") -> Any:
        source = Source(self.options.model, str(self.device), decoded)
        model = load_model(source, device_map=str(self.device), dtype=self.dtype, activations=activations)
        rt.prepack(model)
        return model

    def cases(self) -> Iterator[tuple[str, str, Callable[[], Any]]]:
        """(loop, weights, how to get the model), in order of importance."""
        yield "transformers", "dense", lambda: self.dense
        for activations in ("int8", "float"):
            kind = {"decoded": False, "activations": activations}
            yield "transformers", activations, lambda kind=kind: self.hf_model(**kind)
            yield "realizar_torch", activations, lambda activations=activations: self.own_model(activations)

    def own_model(self, activations: str) -> Any:
        longest = -(-(PROMPT + FIRST + self.options.new) // 256) * 256
        return load_synthetic(
            self.options.model, self.device, dtype=self.dtype, activations=activations, max_seq_len=longest
        )

    def measure(self, loop: str, weights: str, make: Callable[[], Any]) -> dict[str, Any]:
        started = time.perf_counter()
        model = make()
        own = loop == "realizar_torch"
        generate = own_generate if own else hf_generate
        made = time.perf_counter() - started
        # the longest call first: it compiles, and gives transformers' cache the length that later calls keep
        generate(model, self.ids, FIRST + self.options.new)
        error = self.error_of(model, own)
        ready = time.perf_counter() - started - made
        short = min(self.seconds(generate, model, FIRST) for _ in range(RUNS))
        long = min(self.seconds(generate, model, FIRST + self.options.new) for _ in range(RUNS))
        return {
            "loop": loop,
            "weights": weights,
            "bytes": sum({t.data_ptr(): t.nbytes for t in _tensors(model)}.values()),
            "tokens_per_second": self.options.new / (long - short),
            "whole_tokens_per_second": (FIRST + self.options.new) / long,
            "error": error,
            "right": error <= TOLERANCE[weights],
            "seconds_to_make": made,
            "seconds_to_compile": ready,
        }

    def error_of(self, model: Any, own: bool) -> float:
        """rms error over rms of the logits at FIRST generated tokens, chosen by the timed loop itself."""
        with torch.inference_mode():
            if own:
                ids = own_generate(model, self.ids, FIRST)
                found = model(ids[:, :-1], logits_to_keep=FIRST).logits[0].float()
            else:
                out = hf_generate(model, self.ids, FIRST, output_logits=True, return_dict_in_generate=True)
                ids, found = out.sequences, torch.cat(out.logits).float()
            expected = self.dense(ids[:, :-1], logits_to_keep=FIRST).logits[0].float()
        return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    def seconds(self, generate: Callable[..., Any], model: Any, new: int) -> float:
        self.wait()
        started = time.perf_counter()
        generate(model, self.ids, new)
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Compiled code and graphs of the last case."""
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def hf_generate(model: Any, ids: torch.Tensor, new: int, **more: Any) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        **more,
    )


def own_generate(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, eos_token_id=[])


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def report(record: dict[str, Any], dense: float | None) -> None:
    speed = f"{record['tokens_per_second']:8.1f} {record['whole_tokens_per_second']:8.1f}"
    ratio = f"{record['tokens_per_second'] / dense:7.2f}" if dense else f"{'':7}"
    print(
        f"{record['loop']:15} {record['weights']:7} {record['bytes'] / 1e9:7.2f} "
        f"{speed if record['right'] else 'WRONG':>17} {ratio} {record['error']:8.4f} "
        f"{record['seconds_to_make']:6.1f} {record['seconds_to_compile']:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--new", type=int, default=128, help="tokens that are timed")
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no case after these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bench = Bench(options)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    print(
        f"{name}: Llama {options.model}, prompt {PROMPT}, transformers {transformers.__version__}, torch "
        f"{torch.__version__}"
    )
    print("loop            weights      GB    tok/s    whole  /dense    error   make  compile")
    dense = None
    for loop, weights, make in bench.cases():
        if time.perf_counter() - started > options.seconds:
            print(f"{loop} {weights}: not begun after {options.seconds:.0f} s")
            continue
        try:
            record = bench.measure(loop, weights, make)
        except Exception:
            # the other cases do not depend on it
            traceback.print_exc()
            bench.forget()
            continue
        if weights == "dense":
            dense = record["tokens_per_second"]
        report(record, dense)
        bench.records.append(record)
        if options.out:
            found = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
            options.out.write_text(
                json.dumps(found | vars(options) | {"out": None, "runs": bench.records}, indent=1)
            )
        bench.forget()


if __name__ == "__main__":
    main()
