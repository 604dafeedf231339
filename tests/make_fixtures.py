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

FIXTURES = Path(__file__).parent / "fixtures"
# entries that the converter asks for and transformers 5 no longer writes
OLD_ENTRIES: dict[str, dict] = {}


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
            _write_tokenizer(Path(folder))
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | OLD_ENTRIES.get(name, {})))
            _convert(Path(llama_cpp), Path(folder), FIXTURES / f"{name}.gguf")
        np.savez_compressed(FIXTURES / f"{name}.npz", ids=ids.numpy(), logits=logits.numpy(), **short)
        sizes = [(FIXTURES / f"{name}.{kind}").stat().st_size for kind in ("gguf", "npz")]
        assert sum(sizes) <= 150_000, (name, sizes)
        print(f"{name}: {sizes[0]} + {sizes[1]} bytes, logits {logits.std():.2f}")


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB tokens without merges."""
    special = ["<s>", "</s>", "<pad>"]
    vocabulary = {token: i for i, token in enumerate([*special, *map(chr, range(33, 33 + VOCAB - 4)), "Ġ"])}
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
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    entries = {"tokenizer_class": "PreTrainedTokenizerFast"} | names
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def _convert(llama_cpp: Path, folder: Path, target: Path) -> None:
    """llama.cpp's own converter, but for the vocabulary: any tokenizer, named as GPT-2's."""
    script = llama_cpp / "convert_hf_to_gguf.py"
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    from conversion import base, get_model_class

    base.TextModel.get_vocab_base = lambda self: (tokens, kinds, "gpt-2")
    tokens = list(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    converter = get_model_class(architecture)
    converter.set_vocab = lambda self: self._set_vocab_gpt2()
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


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
