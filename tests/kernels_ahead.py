"""A prompt and a step on the GPU's path without a GPU or a compiler: which kernels were asked for, and when.

TRITON_INTERPRET=0 python tests/kernels_ahead.py PATH OF A GGUF FILE
"""

import contextlib
import json
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from sass_of_kernels import NoDevice
from triton.runtime import driver

events: list[tuple[str, str]] = []
refused: set[str] = set()


def compile_nothing(src, **_):
    """In place of triton.compile: a kernel that only says that it was launched."""
    if src.name in refused:
        raise RuntimeError(f"{src.name} does not compile")
    note("compiled", src.name)
    return Kernel(src.name)


class Kernel:
    """What ``run`` of a Triton kernel does without a GPU; it is made at the first look, which takes time."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name, self.loaded = name, False

    def launch_metadata(self, *_: object) -> None:
        return None

    @property
    def run(self) -> Callable[..., None]:
        if not self.loaded:
            self.loaded = True
            note("loaded", self.name)
        return lambda *_: events.append(("launched", self.name))


def note(what: str, name: str) -> None:
    main = threading.current_thread() is threading.main_thread()
    events.append((f"{what} in turn" if main else f"{what} ahead", name))


def put_a_device_in_place() -> None:
    driver.set_active(NoDevice())
    triton.compiler.compile = compile_nothing
    nothing = SimpleNamespace(wait_stream=lambda _: None, record=lambda: None, synchronize=lambda: None)
    torch.cuda.graph_pool_handle = lambda: None
    torch.cuda.Stream = torch.cuda.Event = lambda *_: nothing
    torch.cuda.device = lambda _: contextlib.nullcontext()


def run(path: str, tokens: int) -> dict:
    """Events of the rehearsal and behind it, where it put tokens, and whether the rows were left alone."""
    from realizar_torch.checkpoint.gguf import open_gguf
    from realizar_torch.generation import gpu_state, graph
    from realizar_torch.generation.step import prefill
    from realizar_torch.models.loading import load_transformer

    gpu_state.why_not = graph.why_not = lambda *_: None
    model = load_transformer(
        open_gguf(path), device=torch.device("cpu"), dtype=torch.float32, activations="int8"
    )
    state = gpu_state.GpuState(model, 1, 64, None)
    state.prepare(model)
    step, places = state.decoder.step, []
    launch = step.launch
    step.launch = lambda: (places.append(step.positions.tolist()), launch())
    rows = (state.decoder.step.tokens, state.decoder.step.positions, state.decoder._sampling._integers)
    for part in rows:
        part.fill_(3)
    events.clear()
    with torch.inference_mode():
        state.compile(model, tokens)
        ahead = list(events)
        places_ahead = list(places)
        kept = all(bool((part == 3).all()) for part in rows)
        events.clear()
        logits = prefill(model, torch.arange(tokens)[None], None, state)
        state.decoder.begin(logits, cuda_graph=False)
        state.decoder.issue()
    return {"ahead": ahead, "behind": list(events), "kept": kept, "places": places_ahead}


def refuse_and_interrupt() -> dict:
    """What launches say or do after a rehearsal where a kernel did not compile, and after one cut off."""
    from realizar_torch.triton_kernels.ahead import compile_ahead
    from realizar_torch.triton_kernels.gated import gated

    def work() -> None:
        gated(torch.zeros(2, 64), torch.zeros(2, 32), activation="gelu_tanh")

    def interrupted() -> None:
        raise KeyboardInterrupt

    refused.add("_gated_kernel")
    compile_ahead(work)
    try:
        work()
        error = None
    except RuntimeError as raised:
        error = str(raised)
    refused.clear()
    events.clear()
    with contextlib.suppress(KeyboardInterrupt):
        compile_ahead(interrupted)
    work()
    return {"refused": error, "interrupted": list(events)}


def main() -> None:
    put_a_device_in_place()
    found = {name: run(sys.argv[1], 12) for name in ("first", "second")}
    found["dynamo"] = "torch._dynamo" in sys.modules
    print(json.dumps(found | refuse_and_interrupt()))


if __name__ == "__main__":
    main()
