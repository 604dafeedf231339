"""A model source whose dense matrices are encoded as they are read, one at a time."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType

from torch import Tensor

from realizar_torch import ops
from realizar_torch.caller import warn_caller
from realizar_torch.checkpoint.gguf import TensorInfo
from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.mapped import stored_bytes
from realizar_torch.checkpoint.source import ModelSource, SourceView
from realizar_torch.errors import FormatError
from realizar_torch.format_plan import choose_formats
from realizar_torch.formats import Q6_K, BlockFormat, get_packed_format

# Rows that are no whole blocks take another format, as llama.cpp chooses (llama-quant.cpp,
# tensor_type_fallback; Q4_0 in place of its IQ4_NL).
_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# Small, and either read by row or decisive for the route of a token.
_KEPT = ("position_embd.weight", "*.ffn_gate_inp*.weight")
_MAX_NAMES_SHOWN = 4


class EncodedSource(SourceView):
    """The source with its dense matrices in packed formats.

    plan: a format for all of them, or patterns (fnmatch, on GGUF names such as "blk.*.attn_q.weight") and
    their formats, of which the first that matches decides; what none matches stays dense. With one format
    for all, the output head (or the embedding in its place) is Q6_K at least, as in llama.cpp. Rows that are
    no whole K-quant blocks take a format of blocks of 32 instead, and stay dense, with a warning that names
    them, if they are no whole ones of these either. Vectors stay as they are, and so do packed tensors.

    FormatError for an unknown format, a pattern that matches no matrix, or where nothing can be encoded.
    """

    def __init__(self, source: ModelSource, plan: str | Mapping[str, str]) -> None:
        super().__init__(source)
        if isinstance(plan, str):
            # asked first: an unknown format is not the file's fault
            get_packed_format(plan)
        matrices = {
            name: info
            for name, info in source.tensors.items()
            if len(info.shape) > 1 and not info.fmt.packed and not any(fnmatchcase(name, p) for p in _KEPT)
        }
        if not matrices:
            raise FormatError(
                f"{shown_path(source.path)} holds no dense matrix to quantize; quantize= is for F32, F16 and "
                "BF16 models: leave it out, or take the model in one of these types"
            )
        if isinstance(plan, str):
            head = _HEAD if _HEAD in source.tensors else _EMBEDDING
            wanted = get_packed_format(plan)
            plan = {head: max(wanted, Q6_K, key=lambda fmt: fmt.bits_per_weight).name, "*": plan}
            plan = plan if head in matrices else {"*": wanted.name}
        chosen = choose_formats(plan, matrices)
        self._formats = {
            name: fmt
            for name, wanted in chosen.items()
            if (fmt := _for_rows(wanted, matrices[name].shape[-1])) is not None
        }
        self._tell_of([matrices[name] for name in chosen if name not in self._formats])
        tensors = {name: _encoded(info, self._formats.get(name)) for name, info in source.tensors.items()}
        self._tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._last: tuple[str, Tensor] | None = None

    def _tell_of(self, dense: list[TensorInfo]) -> None:
        """A warning for matrices that were to be encoded and stay dense; FormatError if they are all."""
        if not dense:
            return
        listed = ", ".join(f"{info.name} (rows of {info.shape[-1]})" for info in dense[:_MAX_NAMES_SHOWN])
        count, total = len(dense), len(dense) + len(self._formats)
        found = (
            f"{shown_path(self.path)}: {count} of the {total} matrices to quantize have rows that are no "
            f"whole blocks of any format chosen for them: {listed}{', …' if count > _MAX_NAMES_SHOWN else ''}"
        )
        if not self._formats:
            raise FormatError(f"{found}; nothing would be encoded: leave quantize= out")
        warn_caller(f"{found}; they stay dense")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        """As GGUFFile.read. The last tensor is kept: parts of a fused one are asked for in turn."""
        fmt = self._formats.get(name)
        if fmt is None:
            return super().read(name)
        if self._last is None or self._last[0] != name:
            self._last = None
            dense = super().read(name)
            try:
                blocks = ops.quantize(dense.flatten(0, -2), fmt.name).view(*dense.shape[:-1], -1)
            except FormatError as error:
                raise FormatError(f"{shown_path(self.path)}: {name}: {error}") from None
            del dense
            self.release(name)
            self._last = name, blocks
        return self._last[1]


def _for_rows(fmt: BlockFormat, columns: int) -> BlockFormat | None:
    if columns % fmt.block_size and fmt.name in _FALLBACKS:
        fmt = get_packed_format(_FALLBACKS[fmt.name])
    return None if columns % fmt.block_size else fmt


def _encoded(info: TensorInfo, fmt: BlockFormat | None) -> TensorInfo:
    return info if fmt is None else replace(info, fmt=fmt, nbytes=stored_bytes(fmt, info.shape))
