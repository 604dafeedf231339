"""CpuPrompt: a prompt through all layers of a Transformer by the fused CPU kernel, in passes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realizar_torch.generation.cpu_arena import Arena
from realizar_torch.generation.cpu_program import takes_int8
from realizar_torch.generation.cpu_prompt_program import PromptProgram
from realizar_torch.generation.cpu_step import check_tokens, shared_fields
from realizar_torch.generation.fusable import padding_obstacle
from realizar_torch.generation.workspace import padded_width
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.experts import MixtureOfExperts, Scores
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.ops.recording import dispatch

# Columns of one pass: weights are decoded once for all of them, and they stay in the second-level cache.
_COLUMNS = 256
# The same of mixtures, whose experts get a few of the columns each.
_COLUMNS_OF_MIXTURES = 1024
# Where fewer than one in this many experts is used, matrix tiles do not make up for widening weights to bf16.
_MOST_EXPERTS_IN_BF16 = 8


def takes(model: Transformer) -> bool:
    """Whether the pass computes what the modules of a fusable model would: packed int8 layers only.

    Linears that read the same activations must be padded alike, and routers be in float32.
    """
    linears = [module for name, module in model.layers.named_modules() if name.endswith("_proj")]
    routers = [module.router for module in model.modules() if isinstance(module, MixtureOfExperts)]
    packed = all(takes_int8(linear) for linear in linears) and {Scores} >= set(map(type, routers))
    return packed and padding_obstacle(model) is None


class CpuPrompt:
    """Fills a cache with prompts. Holds addresses of the weights and the cache, as a CpuStep does."""

    def __init__(self, model: Transformer, cache: KVCache):
        self._model, self._cache = model, cache
        self._kept: list[Tensor] = []
        self._capacity = 0
        self._mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self._most = _COLUMNS_OF_MIXTURES if self._mixtures else _COLUMNS
        self._arena: Arena | None = None

    def run(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """input_ids int [B, T] behind what is cached -> fp32 logits [B, V] of the last position."""
        model, cache = self._model, self._cache
        model.begin(input_ids, attention_mask, cache)
        last = self._passes(*self._columns(input_ids))
        cache.advance(input_ids.shape[1])
        return model.logits(last)

    def fill(self, token_ids: Tensor, sequence: int, slot: int) -> None:
        """token_ids int64 [T] of one sequence to its slots from ``slot`` on; the cache's length stays."""
        slots = torch.arange(slot, slot + len(token_ids), device="cpu")
        self._passes(token_ids, torch.full_like(slots, sequence), slots)

    def _passes(self, tokens: Tensor, sequences: Tensor, slots: Tensor) -> Tensor:
        """Runs columns in any number; the residual stream of each sequence's last one, fp32 [B, hidden]."""
        config = self._model.config
        check_tokens(tokens, config.vocab_size)
        last = torch.empty(self._cache.batch_size, config.hidden_size, dtype=torch.float32, device="cpu")
        end = slots.max()
        self._prepare(min(len(tokens), self._most))
        for first in range(0, len(tokens), self._most):
            part = slice(first, first + self._most)
            columns = (tokens[part], sequences[part], slots[part])
            residual = dispatch("prefill", tokens.device, self._pass, *columns)
            ends = slots[part] == end
            last[sequences[part][ends]] = residual[ends]
        return last

    def _columns(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token, sequence and slot of everything that is not padding, sequence by sequence."""
        past = self._cache.length
        slots = torch.arange(past, past + input_ids.shape[1], device="cpu")
        sequences, columns = torch.nonzero(slots >= self._cache.starts[:, None], as_tuple=True)
        return input_ids[sequences, columns].to(torch.int64), sequences, slots[columns]

    def _pass(self, tokens: Tensor, sequences: Tensor, slots: Tensor) -> Tensor:
        """Runs the columns of one pass; their residual stream behind the last layer, fp32 [n, hidden]."""
        from realizar_torch.cpu_kernels import pool, prompt, prompt_attention

        count, threads = len(tokens), torch.get_num_threads()
        if self._arena is None or self._arena.threads < threads:
            self._arena = self._make_arena(threads)
        blocks = torch.tensor(list(_blocks(sequences.tolist(), prompt_attention.QUERIES)), device="cpu")
        context = self._context
        columns = {"tokens": tokens, "sequences": sequences, "slots": slots, "blocks": blocks}
        for name, tensor in columns.items():
            context[name] = tensor.data_ptr()
        context["used"], context["n_blocks"] = count, len(blocks)
        pool.run(prompt.run_prompt, threads, self._instructions, context)
        return self._residual[:count]

    def _prepare(self, count: int) -> None:
        """Buffers for ``count`` columns, and the program over them, unless they are there."""
        from realizar_torch.cpu_kernels import matrix_tiles, program
        from realizar_torch.cpu_kernels.activation_panel import COLUMNS, panel_places

        if count <= self._capacity:
            return
        model, cache, config = self._model, self._cache, self._model.config
        self._capacity = columns = -(-count // COLUMNS) * COLUMNS
        self._arena, self._kept[:] = None, [cache.keys, cache.values, cache.starts]
        hidden_size, q_dim = config.hidden_size, config.q_dim
        widths = (hidden_size, hidden_size, q_dim + 2 * config.kv_dim, q_dim)
        self._residual, hidden, qkv, wide = (
            torch.empty(columns, width, dtype=torch.float32, device="cpu") for width in widths
        )
        # by machine and model, not by the number of columns: a row's result must not depend on its neighbours
        few = all(len(m.router.weight) <= _MOST_EXPERTS_IN_BF16 * m.used for m in self._mixtures)
        bf16 = few and matrix_tiles.available()
        steps = PromptProgram(model, cache, (hidden, qkv, wide), self._kept, bf16)
        self._instructions = steps.instructions()
        sizes = {name: int(self._instructions[name].max()) for name in ("padded", "experts", "used")}
        scales, sums, panel_bytes = panel_places(sizes["padded"], columns, bf16)
        # a column for each choice, and room for what is written behind the last one
        choices = columns * sizes["used"] + COLUMNS if sizes["used"] else 0
        expert_scales, expert_sums, expert_bytes = panel_places(sizes["padded"], choices, bf16)
        self._context = np.zeros(1, program.PROMPT_CONTEXT)
        fields = {
            **shared_fields(model, cache, self._kept),
            "columns": columns,
            "bf16": int(bf16),
            "residual": self._residual.data_ptr(),
            "scales": scales,
            "sums": sums,
            "panel_bytes": panel_bytes,
            "expert_scales": expert_scales,
            "expert_sums": expert_sums,
            "expert_panel_bytes": expert_bytes,
            "expert_columns": choices,
        }
        for name, value in fields.items():
            self._context[name] = value

    def _make_arena(self, threads: int) -> Arena:
        from realizar_torch.cpu_kernels import int8_tile, pool, program, prompt_attention

        context, config, columns = self._context, self._model.config, self._capacity
        experts, used = (int(self._instructions[name].max()) for name in ("experts", "used"))
        angles = 2 * int(context["rotary"][0]) * int(context["ropes"][0])
        head_bytes = 4 * config.head_dim
        scores = 4 * prompt_attention.QUERIES * config.num_heads // config.num_kv_heads
        shared = {
            "barrier": pool.BARRIER_BYTES,
            "counters": program.COUNTER_BYTES * (len(self._instructions) + 1),
            "panels": 2 * int(context["panel_bytes"][0]),
            "cos": columns * angles,
            "sin": columns * angles,
            "chosen": 8 * columns * used,
            "shares": 4 * columns * (used + 1),
            "expert_panels": 2 * int(context["expert_panel_bytes"][0]),
        }
        own = {
            "row": 4 * padded_width(max(config.hidden_size, config.q_dim)),
            "tile": 4 * columns * int8_tile.TILE_ROWS,
            "second_tile": 4 * columns * int8_tile.TILE_ROWS,
            "scores": scores * (self._cache.max_seq_len + prompt_attention.KEYS),
            "transposed": head_bytes * prompt_attention.KEYS,
            "last_rows": head_bytes * prompt_attention.KEYS,
            "probabilities": 4 * experts,
            "ends": 8 * experts,
            "places": 8 * columns * used,
            "products": 4 * int(context["expert_columns"][0]) * int8_tile.TILE_ROWS,
        }
        arena = Arena(shared, own, threads, zeroed=("barrier",))
        for name, value in {**arena.addresses, **arena.offsets}.items():
            context[name] = value
        context["arena"], context["arena_stride"] = arena.base, arena.stride
        return arena


def _blocks(sequences: Sequence[int], size: int) -> Any:
    """(first column, columns) of runs of one sequence, ``size`` long at most."""
    first = 0
    for column in range(1, len(sequences) + 1):
        ends = column == len(sequences) or sequences[column] != sequences[first]
        if ends or column - first == size:
            yield first, column - first
            first = column
