"""Models with random weights in the exact shapes and formats of Q4_K_M files: in memory, or as GGUF.

    python bench/synthetic.py 8b llama-8b.gguf

The weights are finite and have the spread of a trained model; norm weights are far from 1, so that a dropped
fusion shows. There is no vocabulary in the file.
"""

import argparse
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from realizar_torch import reference
from realizar_torch.checkpoint.gguf_header import TensorInfo
from realizar_torch.formats import get_format
from realizar_torch.generation.causal_lm import CausalLM
from realizar_torch.models.loading import load_transformer
from realizar_torch.surgery import prepack

_ALIGNMENT = 32


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama 3, or with ``experts`` of a Qwen 3 mixture; the output matrix is not the table."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int = 128256
    context: int = 131072
    # each of ``inner``, and those that a token uses
    experts: int = 0
    used: int = 0

    def more_bits(self, layer: int) -> bool:
        """Whether llama-quant gives attn_v and ffn_down of this layer Q6_K in a Q4_K_M file."""
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2

    def metadata(self) -> dict[str, Any]:
        sizes = {
            "vocab_size": self.vocab,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "block_count": self.layers,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.dim,
            "attention.value_length": self.dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 500000.0,
        }
        if self.experts:
            inner = {"expert_feed_forward_length": self.inner}
            sizes |= {"expert_count": self.experts, "expert_used_count": self.used} | inner
        arch = "qwen3moe" if self.experts else "llama"
        # llama.cpp's word for a file without a vocabulary
        names = {"general.architecture": arch, "tokenizer.ggml.model": "no_vocab"}
        return names | {f"{arch}.{name}": value for name, value in sizes.items()}

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, format and shape of every tensor, in the order of the file."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        yield "token_embd.weight", "Q4_K", (self.vocab, self.hidden)
        for layer in range(self.layers):
            more = "Q6_K" if self.more_bits(layer) else "Q4_K"
            for name, fmt, shape in (
                ("attn_norm", "F32", (self.hidden,)),
                ("attn_q", "Q4_K", (q, self.hidden)),
                ("attn_k", "Q4_K", (kv, self.hidden)),
                ("attn_v", more, (kv, self.hidden)),
                ("attn_output", "Q4_K", (self.hidden, q)),
                ("ffn_norm", "F32", (self.hidden,)),
                *self._mlp(more),
            ):
                yield f"blk.{layer}.{name}.weight", fmt, shape
        yield "output_norm.weight", "F32", (self.hidden,)
        yield "output.weight", "Q6_K", (self.vocab, self.hidden)

    def _mlp(self, more: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        ending, experts = ("_exps", (self.experts,)) if self.experts else ("", ())
        if self.experts:
            yield "attn_q_norm", "F32", (self.dim,)
            yield "attn_k_norm", "F32", (self.dim,)
            yield "ffn_gate_inp", "F32", (self.experts, self.hidden)
        yield f"ffn_gate{ending}", "Q4_K", (*experts, self.inner, self.hidden)
        yield f"ffn_up{ending}", "Q4_K", (*experts, self.inner, self.hidden)
        yield f"ffn_down{ending}", more, (*experts, self.hidden, self.inner)


SHAPES = {
    "8b": Shape(32, 4096, 32, 8, 128, 14336),
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    # 8 of the 48 layers of Qwen3-30B-A3B, with a fifth of its vocabulary
    "moe": Shape(8, 2048, 32, 4, 128, 768, 30336, 40960, 128, 8),
    "tiny": Shape(8, 256, 8, 2, 32, 512, 1000, 512),
}


class SyntheticFile:
    """What ``open_gguf`` would give for the file that ``write`` writes; tensors are made on demand."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu"):
        self.path, self.metadata, self._device = Path("synthetic"), shape.metadata(), torch.device(device)
        self.tensors = {
            name: TensorInfo(name, get_format(fmt), dims, 0, _nbytes(fmt, dims), 0)
            for name, fmt, dims in shape.tensors()
        }

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        if not info.fmt.packed:
            values = torch.rand(info.shape, device=self._device, generator=generator)
            # norms far from 1, routers around 0
            return values + 0.3 if values.ndim == 1 else values - 0.5
        *rows, columns = info.shape
        return random_weight(info.fmt.name, math.prod(rows), columns, generator).unflatten(0, rows)

    def release(self, name: str) -> None:
        """Nothing is kept."""


def load_synthetic(
    name: str, device: torch.device | str, *, dtype: torch.dtype, activations: str, max_seq_len: int
) -> CausalLM:
    """The model in memory, ready to decode; the same weights for the same name and kind of device."""
    file = SyntheticFile(SHAPES[name], device)
    model = load_transformer(
        file, device=torch.device(device), dtype=dtype, activations=activations, model_class=CausalLM
    )
    prepack(model)
    model.max_seq_len = max_seq_len
    return model


def random_weight(fmt: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Random ``uint8 [rows, row_bytes]`` of values with mean near 0 and deviation 1/sqrt(columns)."""
    spec, device = get_format(fmt), generator.device
    shape = (rows, spec.blocks(columns), spec.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand(*shape[:2], 1, device=device, generator=generator) + 0.5
    # 7.5, the mean of a 4-bit quant, makes the mean weight zero where there is a minimum
    factors = {"d": 1.0, "dmin": 7.5}
    for name, factor in factors.items():
        _set_half(blocks, spec, name, scale * factor * 2**-8)
    sample = reference.dequantize(blocks[:64].flatten(1), fmt, columns)
    target = 2**-8 / (float(sample.std()) * math.sqrt(columns))
    for name, factor in factors.items():
        _set_half(blocks, spec, name, scale * factor * target)
    return blocks.flatten(1)


def _set_half(blocks: torch.Tensor, spec: Any, name: str, values: torch.Tensor) -> None:
    for field in spec.fields:
        if field.name == name and field.kind == "f16":
            start = spec.offset(name)
            blocks[..., start : start + field.nbytes] = values.half().view(torch.uint8)


def write(path: Path, shape: Shape, device: torch.device | str = "cpu") -> None:
    """The model as a GGUF file, version 3."""
    source = SyntheticFile(shape, device)
    with path.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(source.tensors), len(source.metadata)))
        for key, value in source.metadata.items():
            _write_string(out, key)
            if isinstance(value, str):
                out.write(struct.pack("<I", 8))
                _write_string(out, value)
            else:
                is_float = isinstance(value, float)
                out.write(struct.pack("<If" if is_float else "<II", 6 if is_float else 4, value))
        offset = 0
        for name, info in source.tensors.items():
            _write_string(out, name)
            dims = info.shape[::-1]
            out.write(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            out.write(struct.pack("<IQ", info.fmt.ggml_type, offset))
            offset += _aligned(info.nbytes)
        for name in source.tensors:
            out.write(b"\0" * (_aligned(out.tell()) - out.tell()))
            out.write(source.read(name).cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _write_string(out: BinaryIO, text: str) -> None:
    data = text.encode()
    out.write(struct.pack("<Q", len(data)) + data)


def _nbytes(fmt: str, dims: tuple[int, ...]) -> int:
    spec = get_format(fmt)
    return math.prod(dims[:-1]) * spec.blocks(dims[-1]) * spec.block_bytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    write(options.path, SHAPES[options.model], "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{options.path}: {options.path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
