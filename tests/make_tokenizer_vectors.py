"""Makes tests/data/tokenizer_vectors.json: llama.cpp's own vectors, with the vocabulary they need.

    python tests/make_tokenizer_vectors.py llama.cpp/models

Run by hand, not by pytest. The vocabularies are megabytes each. Of every one whose model is supported, the
tokens and merges are kept whose text occurs in the vectors: no other can take part in their encoding. The
whole vocabulary is tested here, on the way.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from make_tokenizer_goldens import DATA, lines

from realizar_torch.checkpoint.byte_level_bpe import byte_alphabet
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.checkpoint.sentence_piece import SPACE
from realizar_torch.checkpoint.tokenizer import Tokenizer
from realizar_torch.checkpoint.vocabulary import BYTE_LEVEL, SENTENCE_PIECE

BYTE = 6
_LONGEST = 64
_SETTINGS = ("model", "pre", "add_bos_token", "add_eos_token", "add_space_prefix")


def read_vectors(path: Path) -> dict[str, list[int]]:
    """Text -> ids without special tokens, of the two files beside a vocabulary."""
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")[:-1]
    outputs = Path(f"{path}.out").read_text(encoding="ascii").splitlines()
    ids = ([int(token) for token in line.split()] for line in outputs)
    return dict(zip(texts, ids, strict=True))


def extract(metadata: Mapping[str, Any], vectors: Mapping[str, list[int]]) -> dict[str, Any]:
    """What the vectors need of a vocabulary that passes them."""
    keys = {name: metadata.get(f"tokenizer.ggml.{name}") for name in _SETTINGS}
    tokenizer = Tokenizer.from_gguf(metadata)
    for text, ids in vectors.items():
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == ids, (text, found, ids)

    stretches = _stretches(vectors, keys["model"])
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    kept = [i for i, token in enumerate(tokens) if token in stretches or kinds[i] == BYTE]
    arrays = {"tokens": [tokens[i] for i in kept], "token_type": [kinds[i] for i in kept]}
    if keys["model"] == BYTE_LEVEL:
        merges = metadata["tokenizer.ggml.merges"]
        arrays["merges"] = [merge for merge in merges if merge.replace(" ", "") in stretches]
    else:
        scores = metadata["tokenizer.ggml.scores"]
        arrays["scores"] = [scores[i] for i in kept]
    settings = {name: value for name, value in keys.items() if value is not None}
    entries = {f"tokenizer.ggml.{name}": value for name, value in (settings | arrays).items()}
    # an id of BOS or EOS among the kept ones would mean nothing
    entries |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False}
    return {"metadata": entries, "original_ids": kept}


def _stretches(texts: Iterable[str], model: str) -> set[str]:
    """Every piece of the texts that a token could be, in the vocabulary's own writing."""
    alphabet = byte_alphabet()
    pieces = set()
    for text in texts:
        bytewise = "".join(alphabet[byte] for byte in text.encode())
        written = {text, bytewise if model == BYTE_LEVEL else SPACE + text.replace(" ", SPACE)}
        for whole in written:
            for start in range(len(whole)):
                pieces.update(
                    whole[start:stop] for stop in range(start + 1, min(len(whole), start + _LONGEST) + 1)
                )
    return pieces


def main() -> None:
    (directory,) = sys.argv[1:]
    vocabularies: dict[str, Any] = {}
    vectors_by_name = {}
    for inputs in sorted(Path(directory).glob("ggml-vocab-*.gguf.inp")):
        name = inputs.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp")
        path = inputs.with_suffix("")
        metadata = open_gguf(path).metadata
        if metadata["tokenizer.ggml.model"] not in (BYTE_LEVEL, SENTENCE_PIECE):
            print(f"{name}: no such tokenizer model here")
            continue
        vectors_by_name[name] = read_vectors(path)
        vocabularies[name] = extract(metadata, vectors_by_name[name])
        print(f"{name}: {len(vectors_by_name[name])} vectors pass")
    # the vocabularies have nearly all texts in common
    texts = list(dict.fromkeys(text for vectors in vectors_by_name.values() for text in vectors))
    for name, vocabulary in vocabularies.items():
        vocabulary["ids"] = [vectors_by_name[name].get(text) for text in texts]
    path = DATA / "tokenizer_vectors.json"
    content = lines({"texts": texts, "vocabularies": vocabularies}, depth=3)
    path.write_text(content + "\n", encoding="ascii")
    print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
