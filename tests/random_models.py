"""Small random models of every architecture row, odd on purpose, written as GGUF files.

Head counts 3:1, a head size that is not hidden/heads, a vocabulary that is no multiple of 32, large biases
and norm weights far from 1: a wrong convention moves the logits by more than any tolerance.
"""

from pathlib import Path
from typing import Any

import torch
from gguf_files import Tensor, plain, write_gguf
from tiny_models import tokenizer_metadata, weight

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 160, 7, 12, 4, 24, 128
WINDOW = 16
ROPE_DIVISORS = [1.0, 1.0, 1.2, 1.7, 2.5, 3.3, 4.9, 5.5, 6.1, 7.0, 8.0, 8.0]


def write_random_model(
    path: Path,
    arch: str,
    *,
    fmt: str = "F32",
    tied: bool = True,
    biases: bool = False,
    divisors: bool = False,
) -> Path:
    """A complete file; ``fmt`` is the format of every matrix."""
    return write_gguf(path, metadata(arch), tensors(arch, fmt, tied, biases, divisors))


def metadata(arch: str) -> dict[str, Any]:
    keys = {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": CONTEXT,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 5000.0,
    }
    if arch == "gemma3":
        keys["gemma3.attention.sliding_window"] = WINDOW
    return keys | tokenizer_metadata()


def tensors(arch: str, fmt: str, tied: bool, biases: bool, divisors: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def vector(size: int, low: float, high: float) -> Tensor:
        return plain(low + (high - low) * torch.rand(size, generator=generator))

    vocab = len(tokenizer_metadata()["tokenizer.ggml.tokens"])
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (q, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, q),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if arch == "gemma3":
        norms |= {"post_attention_norm": HIDDEN, "post_ffw_norm": HIDDEN}
        norms |= {"attn_q_norm": HEAD_DIM, "attn_k_norm": HEAD_DIM}

    entries = {"token_embd.weight": weight(fmt, vocab, HIDDEN, 1, spread=4.0)}
    for layer in range(LAYERS):
        for name, size in norms.items():
            entries[f"blk.{layer}.{name}.weight"] = vector(size, 0.4, 1.6)
        for index, (name, shape) in enumerate(shapes.items()):
            entries[f"blk.{layer}.{name}.weight"] = weight(fmt, *shape, 100 * layer + index + 2, spread=1.0)
            if biases:
                entries[f"blk.{layer}.{name}.bias"] = vector(shape[0], -1.0, 1.0)
    entries["output_norm.weight"] = vector(HIDDEN, 0.4, 1.6)
    if not tied:
        entries["output.weight"] = weight(fmt, vocab, HIDDEN, 3000, spread=4.0)
    if divisors:
        entries["rope_freqs.weight"] = plain(torch.tensor(ROPE_DIVISORS))
    return entries
