"""CpuStep: a Transformer's decode step as a program for the fused CPU kernel."""

import numpy as np
import torch
from torch import Tensor

from realizar_torch.errors import CacheFullError, FormatError
from realizar_torch.generation.cpu_arena import Arena
from realizar_torch.generation.cpu_step_program import StepProgram
from realizar_torch.generation.fusable import obstacle
from realizar_torch.generation.workspace import Workspace, padded_width
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.ops import torch_kernels
from realizar_torch.ops.cpu import kernels
from realizar_torch.reference import ACTIVATION_BLOCK


def why_not(model: Transformer, cache: KVCache) -> str | None:
    """Why the fused kernel cannot take the place of the modules, or None if it computes exactly the same."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if kernels() is torch_kernels:
        return "Numba cannot be used"
    if {model.dtype, cache.keys.dtype} != {torch.float32}:
        return f"the model computes in {model.dtype}, with a cache of {cache.keys.dtype}"
    if any(getattr(module, "layout", "ggml") != "ggml" for module in model.modules()):
        return "weights are prepacked"
    return obstacle(model, dense=True, experts=True)


class CpuStep:
    """One token of every sequence of a cache in one kernel call.

    It holds addresses of the weights, the cache and the workspace: build a new one when any of them may have
    moved. ``run`` allocates no tensors.
    """

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace):
        self._cache, self._workspace = cache, workspace
        self._tokens = torch.zeros(cache.batch_size, dtype=torch.int64, device="cpu")
        self._positions = torch.zeros(cache.batch_size, dtype=torch.int64, device="cpu")
        # Keeps every tensor alive whose address the program holds.
        self._kept: list[Tensor] = [self._tokens, self._positions, cache.keys, cache.values, cache.starts]
        config = model.config
        self._vocabulary = config.vocab_size
        learned = cache.max_seq_len if model.embed_positions is None else config.context_length
        self._longest = min(cache.max_seq_len, learned)
        self._instructions = StepProgram(model, cache, workspace, self._kept).instructions()
        self._context = self._make_context(model)
        self._arena: Arena | None = None

    def run(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [B] behind what is cached -> fp32 logits [B, V], valid until the next step."""
        self._positions.fill_(self._cache.length)
        check_positions(self._positions, self._longest)
        logits = self._launch(token_ids)
        self._cache.advance(1)
        return logits

    def run_at(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """As ``run``, each row at a position of its own: int64 [n] slots of the cache, whose length stays.

        Takes the first n rows, n up to B. A row sees its slots from ``cache.starts`` to its position; what
        lies behind may be anything.
        """
        check_positions(positions, self._longest)
        self._positions[: len(positions)] = positions
        return self._launch(token_ids)

    def _launch(self, token_ids: Tensor) -> Tensor:
        from realizar_torch.cpu_kernels import pool, step

        threads = torch.get_num_threads()
        if self._arena is None or threads > self._arena.threads:
            self._arena = self._make_arena(threads)
        check_tokens(token_ids, self._vocabulary)
        batch = len(token_ids)
        self._tokens[:batch] = token_ids
        pool.run(step.run_step, threads, self._instructions, self._context, batch)
        return self._workspace.logits[:batch]

    def _make_context(self, model: Transformer) -> np.ndarray:
        from realizar_torch.cpu_kernels import program

        context = np.zeros(1, program.CONTEXT)
        fields = {
            **shared_fields(model, self._cache, self._kept),
            "tokens": self._tokens.data_ptr(),
            "positions": self._positions.data_ptr(),
        }
        for name, value in fields.items():
            context[name] = value
        return context

    def _make_arena(self, threads: int) -> Arena:
        """Memory of each thread: its copy of the residual stream, activations, attention scores."""
        from realizar_torch.cpu_kernels import int8_rows, pool, program

        context, batch = self._context, self._cache.batch_size
        width = padded_width(int(self._instructions["width"].max()))
        # activations of each sequence, or of each expert that it uses
        used = int(self._instructions["used"].max())
        vectors = batch * max(1, used)
        angles = 2 * int(context["rotary"][0]) * int(context["ropes"][0])
        group = int(context["heads"][0] // context["kv_heads"][0])
        own = {
            "residual": 4 * batch * int(context["hidden"][0]),
            "row": 4 * int(context["hidden"][0]),
            "activations": 4 * vectors * width,
            "q": vectors * width,
            "scales": 4 * vectors * width // ACTIVATION_BLOCK,
            "sums": 8 * vectors * width // ACTIVATION_BLOCK,
            "cos": batch * angles,
            "sin": batch * angles,
            "scores": 4 * group * self._cache.max_seq_len,
            "tile": 4 * int8_rows.MOST_ROWS,
            "probabilities": 4 * int(self._instructions["experts"].max()),
            "chosen": 8 * batch * used,
            "shares": 4 * batch * (used + 1),
            "products": 4 * int8_rows.MOST_ROWS * batch * used,
        }
        tiles = program.COUNTER_BYTES * len(self._instructions)
        shared = {"barrier": pool.BARRIER_BYTES, "tiles": tiles}
        arena = Arena(shared, own, threads, zeroed=("barrier",))
        for name, value in {**arena.addresses, **arena.offsets}.items():
            context[name] = value
        context["activations_stride"], context["q_stride"] = 4 * width, width
        context["arena"], context["arena_stride"] = arena.base, arena.stride
        return arena


def shared_fields(model: Transformer, cache: KVCache, kept: list[Tensor]) -> dict[str, int | float]:
    """What the contexts of a step and of a prompt pass have in common."""
    config = model.config
    ropes = [model.rope] + ([] if model.local_rope is None else [model.local_rope])
    frequencies = torch.stack([rope.inv_freq for rope in ropes]).contiguous()
    magnitudes = torch.tensor([rope.magnitude for rope in ropes], dtype=torch.float32, device="cpu")
    kept += [frequencies, magnitudes]
    return {
        "starts": cache.starts.data_ptr(),
        "frequencies": frequencies.data_ptr(),
        "magnitudes": magnitudes.data_ptr(),
        "ropes": len(ropes),
        "rotary": model.rope.rotary_dim,
        "temperature": config.temperature,
        "period": config.rope_scaling.original_length,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "max_positions": cache.max_seq_len,
    }


def check_tokens(token_ids: Tensor, vocabulary: int) -> None:
    """The kernels would read whatever memory an id outside the table points to."""
    for token in token_ids.flatten().tolist():
        if not 0 <= token < vocabulary:
            raise FormatError(f"token id {token} is outside the vocabulary of {vocabulary}")


def check_positions(positions: Tensor, length: int) -> None:
    """The kernels would use whatever memory a position outside the cache or the learned ones points to."""
    for position in positions.tolist():
        if not 0 <= position < length:
            raise CacheFullError(
                f"position {position} is outside the {length} that the cache holds and the model knows; "
                "load the model with a larger max_seq_len or shorten the prompt"
            )
