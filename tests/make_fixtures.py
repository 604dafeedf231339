"""Writes tests/fixtures: ``python tests/make_fixtures.py LLAMA_CPP [NAME ...]``.

LLAMA_CPP: the source folder of llama.cpp, as in the sdist of llama-cpp-python 0.3.36 (``vendor/llama.cpp``).
Each model of ``fixture_models`` is converted by its ``convert_hf_to_gguf.py`` in half precision, which its
matrices survive exactly; ``NAME.npz`` holds a prompt (``ids``) and transformers' fp32 ``logits`` for it, for
LongRoPE also those of the first 16 ids alone (``short``).
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from fixture_models import MODELS, VOCAB, WINDOW, is_long, make_model, prompt
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
# entries that the converter asks for and transformers 5 no longer writes
OLD_ENTRIES: dict[str, dict] = {
    "falcon": {"num_kv_heads": 1},
    "gpt2": {"n_ctx": 64},
    "gptneox": {"rotary_pct": 0.5},
    "gptneox-sequential": {"rotary_pct": 0.5},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"},
}


def main() -> None:
    llama_cpp, *names = sys.argv[1:]
    FIXTURES.mkdir(exist_ok=True)
    for name in names or MODELS:
        model, ids = make_model(name), prompt(name)
        with torch.inference_mode():
            logits = model(ids).logits
            short = {"short": model(ids[:, :WINDOW]).logits.numpy()} if is_long(name) else {}
        assert logits.isfinite().all() and logits.std() > 1, (name, logits.std())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            _rename_tensors(name, Path(folder) / "model.safetensors")
            _write_tokenizer(Path(folder))
            _convert(Path(llama_cpp), Path(folder), FIXTURES / f"{name}.gguf", OLD_ENTRIES.get(name, {}))
        np.savez_compressed(FIXTURES / f"{name}.npz", ids=ids.numpy(), logits=logits.numpy(), **short)
        sizes = [(FIXTURES / f"{name}.{kind}").stat().st_size for kind in ("gguf", "npz")]
        assert sum(sizes) <= 150_000, (name, sizes)
        print(f"{name}: {sizes[0]} + {sizes[1]} bytes, logits {logits.std():.2f}")


def _rename_tensors(name: str, path: Path) -> None:
    """What transformers and the converter call differently."""
    tensors = load_file(path)
    if name == "stablelm-parallel":
        # the converter stacks the norms of all heads itself, but then finds them unprocessed
        for key in [key for key in tensors if key.endswith("layernorm.norms.0.weight")]:
            stem = key.removesuffix(".norms.0.weight")
            count = sum(other.startswith(f"{stem}.norms.") for other in tensors)
            tensors[f"{stem}.weight"] = torch.stack(
                [tensors.pop(f"{stem}.norms.{head}.weight") for head in range(count)]
            )
    if name == "internlm2":
        # transformers has no InternLM2; it is Llama but for the names and q, k and v in groups by key head
        for layer in range(2):
            prefix = f"model.layers.{layer}."
            parts = [tensors.pop(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv"]
            groups = [part.unflatten(0, (2, -1)) for part in parts]
            tensors[f"{prefix}attention.wqkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1)
        tensors = {_internlm2(key): tensor for key, tensor in tensors.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})


def _internlm2(key: str) -> str:
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    for old, new in names.items():
        key = key.replace(old, new)
    return key


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB tokens, one of them merged."""
    special = ["<s>", "</s>", "<pad>"]
    characters = map(chr, range(33, 33 + VOCAB - 5))
    vocabulary = {token: i for i, token in enumerate([*special, *characters, "Ġ", "th"])}
    assert len(vocabulary) == VOCAB
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, token in enumerate(special)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t h"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    entries = {"tokenizer_class": "PreTrainedTokenizerFast"} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def _convert(llama_cpp: Path, folder: Path, target: Path, entries: dict) -> None:
    """llama.cpp's own converter, but for the vocabulary, which is always read as GPT-2's."""
    script = llama_cpp / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion import base, get_model_class

    base.TextModel.get_vocab_base = lambda self: (tokens, kinds, "gpt-2")
    tokens = list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    config = json.loads((folder / "config.json").read_text()) | entries
    base.ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(config))
    get_model_class(config["architectures"][0])
    for converter in _subclasses(base.TextModel):
        converter.set_vocab = base.TextModel._set_vocab_gpt2
    sys.argv = [
        str(script),
        str(folder),
        "--outfile",
        str(target),
        "--outtype",
        "f16",
        "--model-name",
        target.stem,
    ]
    runpy.run_path(str(script), run_name="__main__")


def _subclasses(parent: type) -> list[type]:
    children = parent.__subclasses__()
    return children + [grandchild for child in children for grandchild in _subclasses(child)]


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
