"""PromptGraphs: passes of few rows on static memory, replayed from CUDA graphs, one per number of rows."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from realizar_torch.generation.captures import Captures
from realizar_torch.generation.graph import GraphStats
from realizar_torch.generation.prompt_pass import PromptMemory, PromptModel, PromptPass
from realizar_torch.generation.prompt_rows import FixedRows, Piece
from realizar_torch.generation.rehearsal import rehearse
from realizar_torch.generation.workspace import MAX_BATCH
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.ops.recording import dispatch

# Rows of the graphs: a pass takes the first that is large enough. Beyond the last the device is slower than
# the host.
ROWS = (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)


class _Bucket:
    """One number of rows for one number of sequences: its inputs, and the graph once there is one."""

    def __init__(self, model: PromptModel, rows: FixedRows, cache: KVCache, memory: PromptMemory):
        self.rows = rows
        self.tokens = torch.zeros(rows.count, dtype=torch.int64, device=model.device)
        self._pass = PromptPass(model, rows.tables, cache, memory)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rehearsed = False
        self.runs = 0
        self.result = memory.wanted_stream[: rows.sequences]

    def work(self) -> None:
        """What a graph holds: tokens and tables -> keys and values in the cache, ``result``."""
        self._pass.run(self.tokens)

    def rehearse(self) -> Tensor:
        """A pass of surplus rows only; returns ``result``."""
        self.work()
        self.rehearsed = True
        return self.result


class PromptGraphs:
    """Runs passes whose surplus rows compute what nobody sees. Eager calls and graphs run the same launches.

    The first pass in a bucket compiles its kernels and runs eagerly, which loads them; the second one
    captures it, which takes as long as launching it once more. All buckets share one memory and one pool. It
    holds addresses of the weights: make a new one when any may have moved; a cache that has moved is noticed.
    """

    def __init__(self, model: PromptModel, block_rows: int):
        self._model, self._block_rows = model, block_rows
        self._memory: PromptMemory | None = None
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._place: tuple = ()
        self._captures = Captures(model.device, "prompts run launch by launch")
        self._stream: torch.cuda.Stream | None = None
        self._replays = self._eager = 0

    @property
    def stats(self) -> GraphStats:
        """Of passes, where it says steps."""
        return GraphStats(self._captures.count, self._replays, self._eager, self._captures.fallback)

    def takes(self, pieces: Sequence[Piece], cache: KVCache) -> bool:
        rows = sum(piece.count for piece in pieces)
        return rows <= ROWS[-1] and len(pieces) <= cache.batch_size <= MAX_BATCH

    def run(
        self, tokens: Tensor, pieces: Sequence[Piece], cache: KVCache, cuda_graph: bool | str = "auto"
    ) -> Tensor:
        """One pass of pieces that it ``takes``; tokens int [N].

        Returns fp32 [W, hidden]: see PromptPass. cuda_graph: as in ``DecodeGraph.begin``.
        """
        bucket = self._bucket(len(tokens), cache)
        if not bucket.rehearsed:
            rehearse(bucket.rehearse)
        bucket.tokens[: len(tokens)].copy_(tokens)
        wanted = bucket.rows.fill(pieces)
        graph = self._graph(bucket, cuda_graph)
        dispatch("prefill", self._model.device, bucket.work if graph is None else graph.replay)
        bucket.runs += 1
        self._eager += graph is None
        self._replays += graph is not None
        return bucket.result[:wanted].clone()

    def rehearsal(self, count: int, cache: KVCache) -> Callable[[], Tensor] | None:
        """A pass of ``count`` rows, or of the most, to be rehearsed; None if there was one already."""
        bucket = self._bucket(min(count, ROWS[-1]), cache)
        return None if bucket.rehearsed else bucket.rehearse

    def _bucket(self, count: int, cache: KVCache) -> _Bucket:
        parts = [cache.keys, cache.values, cache.starts] + ([] if cache.scales is None else [cache.scales])
        place = (*(part.data_ptr() for part in parts), cache.dtype, cache.keys.stride())
        if place != self._place:
            self._buckets.clear()
            self._captures.new_pool()
            self._place = place
        key = next(rows for rows in ROWS if rows >= count), cache.batch_size
        if key not in self._buckets:
            # tensors of inference mode could not be written to outside of it
            with torch.inference_mode(False):
                if self._memory is None:
                    self._memory = PromptMemory(self._model, ROWS[-1], MAX_BATCH)
                rows = FixedRows(*key, self._block_rows, self._model.device)
                self._buckets[key] = _Bucket(self._model, rows, cache, self._memory)
        return self._buckets[key]

    def _graph(self, bucket: _Bucket, wanted: bool | str) -> torch.cuda.CUDAGraph | None:
        """The bucket's graph, captured at its second use; None after a capture has failed."""
        if wanted is False or bucket.runs == 0 or self._model.device.type != "cuda":
            return None
        if bucket.graph is None:
            bucket.graph = self._captures.attempt(partial(self._capture, bucket), wanted)
        return bucket.graph

    def _capture(self, bucket: _Bucket) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._model.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
                with torch.cuda.stream(self._stream):
                    # cuBLAS keeps its scratch memory of a stream for ever: it must not come from the pool
                    one = torch.ones(16, 16, dtype=self._model.dtype, device=self._model.device)
                    torch.mm(one, one)
            return self._captures.record(bucket.work, self._stream)
