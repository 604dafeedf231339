"""PromptProgram: a Transformer's layers as instructions for many columns at a time, mixtures included."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from realizar_torch.generation.cpu_program import LayerProgram, Linear, Matrices
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.experts import MixtureOfExperts, QuantizedExperts, Scores
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP


class PromptProgram(LayerProgram):
    """The layers, with kernels for many vectors at a time; the residual stream ends complete."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        buffers: tuple[Tensor, Tensor, Tensor],
        kept: list[Tensor],
        bf16: bool,
    ):
        self._bf16 = bf16
        super().__init__(model, cache, buffers, kept)
        self.layers()

    def weight(self, linear: Linear | Matrices) -> dict[str, Any]:
        from realizar_torch.cpu_kernels import row_kernels

        assert isinstance(linear, QuantizedLinear | QuantizedExperts)
        kernel = row_kernels.bf16_matmul if self._bf16 else row_kernels.int8_matmul
        named = {"kernel": kernel(linear.fmt), "width": linear.padded_features, "bias": self.bias(linear)}
        return {**named, **self.matrix(linear.weight)}

    def readers(self, linears: Sequence[Linear | Matrices]) -> dict[str, Any]:
        from realizar_torch.cpu_kernels.int8_matmul import kind_of_sums

        kinds = padded = 0
        for linear in linears:
            assert isinstance(linear, QuantizedLinear | QuantizedExperts)
            kinds |= 1 << kind_of_sums(linear.fmt)
            padded = linear.padded_features
        return {"barrier": 1, "kinds": kinds, "padded": padded}

    def inputs(self, mlp: Any) -> dict[str, Any]:
        if not isinstance(mlp, MixtureOfExperts):
            return super().inputs(mlp)
        # the experts' columns are not known before the router has read this
        target, stride = self._normed_rows()
        readers = self.readers([]) if mlp.shared is None else super().inputs(mlp.shared_expert)
        return {**readers, "target": target, "target_stride": stride}

    def finish_mlp(self, mlp: GatedMLP | MLP) -> None:
        self.linear(mlp.down_proj, self._hidden, panel=1)

    def mixture(self, mixture: MixtureOfExperts) -> None:
        """Scores and routes; the shared expert; the chosen experts' inputs, inner values, and sum of outputs.

        The shared expert's output goes where the sum will stand.
        """
        experts, count, used = mixture.experts, len(mixture.router.weight), mixture.used
        shared, both = mixture.shared, int(mixture.shared is not None)
        routes = {"experts": count, "used": used, "shared": both, "normalized": int(mixture.normalized)}
        scores, stride = self.room("scores", 1, count + 1)
        self._score(mixture.router, scores, stride, barrier=1 - both)
        if shared is not None:
            shared_expert, gate = shared
            self._score(gate, scores + 4 * count, stride, barrier=1)
            self.gated(shared_expert, self._wide, barrier=0)
        self.emit("ROUTE", source=scores, source_stride=stride, barrier=1, **routes)
        if shared is not None:
            self.linear(shared_expert.down_proj, self._hidden, panel=1, barrier=0)
        self.emit("GROUP", experts=count, used=used)
        inputs = self.readers([experts.gate_proj, experts.up_proj])
        normed, normed_stride = self._normed_rows()
        width = self._model.config.hidden_size
        self.emit("LOAD", source=normed, source_stride=normed_stride, width=width, used=used, **inputs)
        self.gated(experts, (0, 0), opcode="GATED_EXPERTS", experts=count)
        target = {"target": self._hidden[0], "target_stride": self._hidden[1]}
        self.emit("MIX_EXPERTS", barrier=1, **routes, **target, **self.weight(experts.down_proj))

    def _normed_rows(self) -> tuple[int, int]:
        """Where the norm in front of a mixture stands in fp32."""
        return self.room("normed", 1, self._model.config.hidden_size)

    def _score(self, router: Scores, target: int, stride: int, barrier: int) -> None:
        normed, normed_stride = self._normed_rows()
        matrix, width = self.matrix(router.weight.float()), router.weight.shape[1]
        source = {"source": normed, "source_stride": normed_stride, "width": width}
        self.emit("SCORE", target=target, target_stride=stride, barrier=barrier, **source, **matrix)
