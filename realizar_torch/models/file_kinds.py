"""GGUF files that are not models: what they are, said to whoever takes them for one."""

from realizar_torch.checkpoint.gguf_errors import shown_path
from realizar_torch.checkpoint.source import ModelSource
from realizar_torch.errors import UnsupportedArchitectureError

# general.type -> what such a file is, and what to do instead
_KINDS = {
    "adapter": "a LoRA adapter; give the model that it was made for, or one that it was merged into",
    "imatrix": "an importance matrix, from which quantizers learn; give a model",
    "mmproj": "the projector of a multimodal model; give the file of its language model",
}


def check_is_model(source: ModelSource) -> None:
    """UnsupportedArchitectureError for an adapter, an importance matrix, a vision projector or a vocabulary
    alone."""
    metadata = source.metadata
    kind = metadata.get("general.type")
    if metadata.get("general.architecture") == "clip":
        # older projectors tell nothing else
        kind = "mmproj"
    if isinstance(kind, str) and kind in _KINDS:
        raise UnsupportedArchitectureError(f"{shown_path(source.path)} is {_KINDS[kind]}")
    if not source.tensors and "tokenizer.ggml.tokens" in metadata:
        raise UnsupportedArchitectureError(
            f"{shown_path(source.path)} is a vocabulary without weights; give a model, and this as tokenizer="
        )
