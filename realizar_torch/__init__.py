"""GGUF block-quantized weights, kept packed in PyTorch: Triton kernels on NVIDIA GPUs, Numba on CPUs."""

from importlib import import_module
from typing import Any

from realizar_torch.forked_children import keep_them_to_one_thread

__version__ = "0.1.0"

# public name -> the module that defines it; resolved on first use, so that the import stays light
_HOMES = {
    "BackendUnavailableError": "errors",
    "CacheFullError": "errors",
    "CheckpointError": "errors",
    "FormatError": "errors",
    "GGUFError": "errors",
    "IncompleteShardsError": "errors",
    "MissingTensorsError": "errors",
    "RealizarError": "errors",
    "UnsupportedArchitectureError": "errors",
    "supported_formats": "formats",
    "record_dispatch": "metrics",
    "dequantize": "reference",
    "quantize": "ops",
    "open_gguf": "checkpoint.gguf",
    "QuantizedLinear": "nn.linear",
    "QuantizedEmbedding": "nn.embedding",
    "FusedLayerNormLinear": "nn.norm_linear",
    "KVCache": "nn.kv_cache",
    "ModelConfig": "models.config",
    "Transformer": "models.transformer",
    "BatchedGenerator": "generation.batch",
    "CausalLM": "generation.causal_lm",
    "load": "generation.causal_lm",
    "DecodeGraph": "generation.graph",
    "save": "models.saving",
    "quantize_model": "quantization",
    "prepack": "surgery",
    "unpack": "surgery",
    "PrefixCache": "generation.prefix",
    "generate": "generation.text",
    "stream": "generation.text",
    "Workspace": "generation.workspace",
    "doctor": "diagnosis",
}
_SUBMODULES = ("hf", "lora", "ops")

__all__ = ["__version__", *_HOMES, *_SUBMODULES]

keep_them_to_one_thread()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
