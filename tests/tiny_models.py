"""A tiny llama GGUF of random weights in many packed formats, with a byte-level BPE tokenizer and a chat
template.

``write_tiny_llama(path)`` is a complete model file of about 1 MB: two layers, hidden size 256, grouped
heads, a tensor in every packed format. ``TINY`` tells its sizes. Weights have the spread of a trained model
(1/sqrt(columns)), so logits differ by whole units and greedy choices do not hang on rounding.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import random_blocks
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import Tensor, Typed, plain, write_gguf

from realizar_torch.formats import get_format


class Sizes(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    context: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Sizes(hidden=256, inner=512, layers=2, heads=8, kv_heads=2, context=128)

# one format per (layer, tensor), so that every packed format and a plain one takes part
FORMATS_BY_LAYER = (
    {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q6_K", "attn_output": "Q4_1"}
    | {"ffn_gate": "Q4_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K"},
    {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "F16", "attn_output": "Q2_K"}
    | {"ffn_gate": "Q5_K", "ffn_up": "Q3_K", "ffn_down": "BF16"},
)

MERGES = (
    "t h",
    "Ġ th",
    "Ġth e",
    "i n",
    "Ġ a",
    "a n",
    "an d",
    "Ġ c",
    "o r",
    "e r",
    "Ġ i",
    "Ġi s",
    "Ġ o",
    "Ġo f",
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_llama(
    path: str | Path, *, seed: int = 0, metadata: Mapping[str, Any] | None = None, sizes: Sizes = TINY
) -> Path:
    """Write the file and return its path; ``metadata`` replaces or adds keys (None as a value removes
    one)."""
    entries = tiny_metadata(sizes) | dict(metadata or {})
    kept = {key: value for key, value in entries.items() if value is not None}
    return write_gguf(path, kept, tiny_tensors(sizes, seed))


def tiny_metadata(sizes: Sizes = TINY) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "general.name": "tiny random llama",
        "general.license": "apache-2.0",
        "llama.block_count": sizes.layers,
        "llama.context_length": sizes.context,
        "llama.embedding_length": sizes.hidden,
        "llama.feed_forward_length": sizes.inner,
        "llama.attention.head_count": sizes.heads,
        "llama.attention.head_count_kv": sizes.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": sizes.head_dim,
    } | tokenizer_metadata()


def tokenizer_metadata() -> dict[str, Any]:
    """A gpt2-type tokenizer: the specials, 256 bytes, one token per merge. It adds no BOS of its own."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed("i32", [3] * 3 + [1] * (len(tokens) - 3)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte 0 to 255 (Radford et al. 2019, GPT-2's
    encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tiny_tensors(sizes: Sizes = TINY, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of the model, untied head in Q8_0, norm weights far from 1."""
    vocab = len(tokenizer_metadata()["tokenizer.ggml.tokens"])
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "attn_q": (q, sizes.hidden),
        "attn_k": (kv, sizes.hidden),
        "attn_v": (kv, sizes.hidden),
        "attn_output": (sizes.hidden, q),
        "ffn_gate": (sizes.inner, sizes.hidden),
        "ffn_up": (sizes.inner, sizes.hidden),
        "ffn_down": (sizes.hidden, sizes.inner),
    }
    generator = torch.Generator().manual_seed(seed)

    def norm() -> Tensor:
        return plain(0.5 + torch.rand(sizes.hidden, generator=generator))

    tensors = {"token_embd.weight": weight("Q8_0", vocab, sizes.hidden, seed)}
    for layer in range(sizes.layers):
        formats = FORMATS_BY_LAYER[layer % len(FORMATS_BY_LAYER)]
        tensors[f"blk.{layer}.attn_norm.weight"] = norm()
        tensors[f"blk.{layer}.ffn_norm.weight"] = norm()
        for index, (name, (rows, columns)) in enumerate(shapes.items()):
            own_seed = 1000 * seed + 10 * layer + index + 1
            tensors[f"blk.{layer}.{name}.weight"] = weight(formats[name], rows, columns, own_seed)
    tensors["output_norm.weight"] = norm()
    tensors["output.weight"] = weight("Q8_0", vocab, sizes.hidden, seed + 1, spread=3.0)
    return tensors


def weight(fmt: str, rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    """A random matrix [rows, columns] with standard deviation ``spread / sqrt(columns)``, as a file entry."""
    deviation = spread / math.sqrt(columns)
    spec = get_format(fmt)
    if not spec.packed:
        values = deviation * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        return plain(values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[fmt]))
    blocks = random_blocks(fmt, rows, columns, seed).numpy()
    factor = deviation / dequantize(blocks, GGMLQuantizationType(spec.ggml_type)).std()
    flat = blocks.reshape(-1, spec.block_bytes)
    for field in spec.fields:
        if field.kind == "f16":
            at = slice(spec.offset(field.name), spec.offset(field.name) + field.nbytes)
            scaled = flat[:, at].copy().view(np.float16).astype(np.float32) * factor
            flat[:, at] = scaled.astype(np.float16).view(np.uint8)
    return fmt, (rows, columns), blocks.tobytes()
