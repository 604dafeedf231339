"""StepProgram: a Transformer as instructions for one token at a time, mixtures of experts included."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from realizar_torch.generation.cpu_program import LayerProgram, Linear, Matrices, takes_int8
from realizar_torch.generation.workspace import Workspace
from realizar_torch.models.transformer import Transformer
from realizar_torch.nn.experts import MixtureOfExperts, QuantizedExperts
from realizar_torch.nn.kv_cache import KVCache
from realizar_torch.nn.linear import QuantizedLinear
from realizar_torch.nn.mlp import MLP, GatedMLP


class StepProgram(LayerProgram):
    """The layers, the final norm and the head, with kernels for one vector at a time."""

    def __init__(self, model: Transformer, cache: KVCache, workspace: Workspace, kept: list[Tensor]):
        super().__init__(model, cache, (workspace.hidden, workspace.qkv, workspace.wide), kept)
        self.layers()
        self.norm(model.norm, **self.readers([model.lm_head]))
        scale, softcap = model.config.logit_scale, model.config.final_softcap
        logits: dict[str, Any] = {"scale": 0.0 if scale == 1.0 else scale, "softcap": softcap}
        self.linear(model.lm_head, self.buffer(workspace.logits), barrier=0, **logits)

    def weight(self, linear: Linear | Matrices) -> dict[str, Any]:
        from realizar_torch.cpu_kernels import dense_rows, row_kernels

        weight = linear.weight
        if isinstance(linear, QuantizedLinear | QuantizedExperts):
            rows = row_kernels.int8_rows if takes_int8(linear) else row_kernels.float_rows
            kernel, width = rows(linear.fmt), linear.in_features
        else:
            kernel, weight, width = dense_rows.dense_rows(), weight.float(), weight.shape[-1]
        named = {"kernel": kernel, "int8": int(takes_int8(linear)), "width": width}
        return {**named, "bias": self.bias(linear), **self.matrix(weight)}

    def readers(self, linears: Sequence[Linear | Matrices]) -> dict[str, Any]:
        # every thread has activations of its own, in the forms that their readers take
        quantized = [linear.padded_features for linear in linears if takes_int8(linear)]
        return {"padded": max(quantized, default=0), "int8": int(bool(quantized))}

    def finish_mlp(self, mlp: GatedMLP | MLP) -> None:
        self.load(self._wide, self._model.config.intermediate_size, mlp.down_proj)
        self.linear(mlp.down_proj, self._hidden)

    def mixture(self, mixture: MixtureOfExperts) -> None:
        """Scores, and the shared expert's inner values; the chosen experts' inner values; the sum of outputs.

        The shared expert's output goes where the sum will stand.
        """
        experts, count, used = mixture.experts, len(mixture.router.weight), mixture.used
        shared, both = mixture.shared, int(mixture.shared is not None)
        scores = self.room("scores", 1, count + 1)
        self.linear(mixture.router, scores, barrier=1 - both)
        if shared is not None:
            shared_expert, gate = shared
            self.linear(gate, scores, count, barrier=0)
            shared_width = self.weight(shared_expert.down_proj)["width"]
            shared_inner = self.room("shared", 1, shared_width)
            self.gated(shared_expert, shared_inner)
        routes = {"experts": count, "used": used, "shared": both, "normalized": int(mixture.normalized)}
        self.emit("ROUTE", source=scores[0], source_stride=scores[1], **routes)
        down = self.weight(experts.down_proj)
        inner = self.room("inner", used, down["width"])
        self.gated(experts, inner, opcode="GATED_EXPERTS", used=used, barrier=1 - both)
        if shared is not None:
            self.load(shared_inner, shared_width, shared_expert.down_proj)
            self.linear(shared_expert.down_proj, self._hidden)
        self.load(inner, down["width"], experts.down_proj, used=used)
        target = {"target": self._hidden[0], "target_stride": self._hidden[1]}
        self.emit("MIX_EXPERTS", barrier=1, used=used, shared=both, **target, **down)
