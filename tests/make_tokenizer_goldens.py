"""Makes tests/data/tokenizer_*.json: ids of many texts as llama.cpp sees them. Run by hand, not by pytest.

    pip install llama-cpp-python
    python tests/make_tokenizer_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-Q4_K_M.gguf

Two files are for the real vocabularies, one for every pre-tokenizer on a small byte-level vocabulary that
merges across words (so that each cut shows in the ids), one for a small SentencePiece vocabulary with equal
scores.
"""

import ctypes
import hashlib
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import llama_cpp
import tokenizers
from gguf_files import write_gguf

from realizar_torch.checkpoint.pretokenizers import PRE_TOKENIZERS

DATA = Path(__file__).parent / "data"

TEXTS = [
    "",
    " ",
    "a",
    "The capital of France is",
    "Call me Ishmael. Some years ago -- never mind how long precisely -- I've had little money; it's TRUE!",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # O(2**n)\n",
    '#include <stdio.h>\r\nint main(void) {\r\n\tprintf("%d\\n", 0x1F);\r\n\treturn 0;\r\n}\r\n',
    '{"key": [1, 2.5, -3e10, null], "päth": "C:\\\\Users\\\\x"}',
    "    23",
    "\n\n23\n 23\n  4567890 1,000,000.25",
    "x1 y22 z333 w4444 ٣٤٥٦ ½ Ⅷ ²³ 三百",
    "a  b   c    d     e" + " " * 40 + "f ",
    "tabs\t\t\tand\n\n\n\nnewlines \n \n  \n\t \r\n\r\n end\n",
    "😀 👨‍👩‍👧‍👦 🇩🇪 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️",
    "日本語のテスト。漢字かな交じり文、句読点。中文字符测试，你好！한국어 시험입니다.",
    "、\u3000\u3000、\u3000\u3000、\u3000\u3000、。！\u3000(\u3000)",
    "ไทยก็ได้ हिन्दी में किताबें עִבְרִית العَرَبِيَّة مرحبا",
    "Cafe\u0301 na\u0308ive A\u030a\u0301 e\u0301\u0302 \u0301lone q\u0323\u0307",
    "Straße İstanbul ǅ ſ K \u2126 ﬁ Ünïcödé ñandú Ångström Привет мир Γειά σου Κόσμε",
    "don't I'VE we'll THEY'RE 'tis 's 'S it’s rock'n'roll o'clock '' '",
    "zebra Türkiye'deki 'truth 'dog l'sub 'real 'vest 'lloyd 'many 'Told 'ſa 'ſa 'ſa",
    "HTTPServer camelCase snake_case SCREAMING_CASE iPhone15Pro aBcDeF e.g. U.S.A.",
    "!!! ?! ... --- === *** $$$ €£¥ ^^ ~~ || && => <= != :: // /* */ (a)[b]{c} @#%",
    "“quotes” ‘single’ «guillemets» – en — em … ellipsis • bullet § ¶ ©®™ ° ± × ÷",
    "nbsp\u00a0thin\u2009ideo\u3000line\u2028para\u2029nel\x85end zero\u200bwidth\u200djoin \ufeff",
    "\0nul \x01\x07\x0b\x0c\x1c\x1f\x7f controls \x80\x9f",
    "▁ ▁▁ a▁b ▁c ▁▁▁d _ __",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nhi<end_of_turn>\n<bos><eos><pad><unk>",
    "<s> </s> <unk> <mask> [INST] hi [/INST] <<SYS>> <|user|>  \n x <|end|> <0x0A><0x41>",
    "<html><body><h1>Title</h1><table><tr><td>1</td></tr></table></body></html>",
    "<unused0><unused99>[multimodal]<repo_name><file_sep><|im_start",
    "https://example.org/a/b?c=d&e=%20f#g user@example.com 2024-12-31T23:59:59Z 127.0.0.1:8080",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa ababababab =-=-=-=-= xyxyxyxyxyx " + "\n" * 33,
    "private \ue000 use \U000f0000 unassigned \u0378 \U0003fffe noncharacter \uffff \U0010ffff",
]


def random_texts(count: int, seed: int) -> list[str]:
    """Strings of random characters, half of them ASCII or spaces and the rest any that Unicode assigns."""
    rng = random.Random(seed)
    characters = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    simple = [chr(c) for c in range(32, 127)] + [" ", " ", "\n", "\t", "'s", "1", "12"]
    return ["".join(rng.choice(rng.choice([simple, characters])) for _ in range(12)) for _ in range(count)]


class Oracle:
    """llama.cpp's tokenizer of a GGUF file."""

    def __init__(self, path: str | Path) -> None:
        self._llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self.vocab = self._llama._model.vocab

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (2 * len(raw) + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), add_special, parse_special)
        assert count >= 0
        return list(ids[:count])

    def both(self, text: str) -> list[list[int]]:
        """Ids of the bare text, and with everything: BOS, EOS and special tokens parsed."""
        return [self.encode(text, add_special=on, parse_special=on) for on in (False, True)]

    def end_of_generation(self) -> list[int]:
        size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        return [i for i in range(size) if llama_cpp.llama_vocab_is_eog(self.vocab, i)]

    def pieces_sha256(self) -> str:
        """Over every token: what it stands for with special tokens shown, and with them hidden."""
        digest, buffer = hashlib.sha256(), ctypes.create_string_buffer(1 << 16)
        for token in range(llama_cpp.llama_vocab_n_tokens(self.vocab)):
            for special in (True, False):
                count = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
                assert count >= 0
                digest.update(b"%d:%s" % (count, buffer.raw[:count]))
        return digest.hexdigest()


def real_model(path: str) -> dict[str, Any]:
    oracle = Oracle(path)
    return {
        "bos_token_id": llama_cpp.llama_vocab_bos(oracle.vocab),
        "eos_token_id": llama_cpp.llama_vocab_eos(oracle.vocab),
        "eos_token_ids": oracle.end_of_generation(),
        "pieces_sha256": oracle.pieces_sha256(),
        "texts": [[text, *oracle.both(text)] for text in [*TEXTS, *random_texts(100, seed=1)]],
    }


def train(texts: Iterable[str], size: int, alphabet: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges of a BPE that knows no words: its merges cross every border that a text has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, initial_alphabet=alphabet, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(merge) for merge in model["merges"]]


def pre_tokenizers() -> dict[str, Any]:
    texts = [*TEXTS, *random_texts(10, seed=2)]
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoded = ["".join(word for word, _ in to_bytes.pre_tokenize_str(text)) for text in texts]
    tokens, merges = train(encoded * 2, 1900, sorted(to_bytes.alphabet()))
    # a word that no merges lead to: only a tokenizer that ignores merges finds it
    tokens.append("zebra")
    # runs of spaces that are no power of two
    if "ĠĠĠ" not in tokens:
        tokens.append("ĠĠĠ")
        merges.append("ĠĠ Ġ")
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<|endoftext|>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    rows: list[dict[str, Any]] = []
    for name in PRE_TOKENIZERS:
        oracle = oracle_of(metadata | {"tokenizer.ggml.pre": name})
        # a pre-tokenizer may add BOS of its own: that is part of its row
        ids = [oracle.encode(text, add_special=True, parse_special=False) for text in texts]
        for row in rows:
            if row["ids"] == ids:
                row["names"].append(name)
                break
        else:
            rows.append({"names": [name], "ids": ids})
    return {"metadata": metadata, "texts": texts, "rows": rows}


def sentence_piece() -> dict[str, Any]:
    texts = [*TEXTS, *random_texts(40, seed=3)]
    escaped = [text.replace(" ", "▁") for text in texts]
    special = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    added = {"<|user|>": 3, "<|end|>": 1, "<|im_end|>": 4, "[INST]": 4, "  ": 4, "<unused0>": 5}
    # llama.cpp wants this one of a Phi-3 model
    added["<|endoftext|>"] = 3
    # characters that are in longer tokens, but have none of their own
    left_out = {*special, *added, "x", "Я", "日"}
    # llama.cpp reads the text of a token up to the first NUL
    learned = [t for t in train(escaped * 2, 1200, [])[0] if t not in left_out and "\0" not in t]
    tokens = [*special, *learned, *added]
    kinds = [*special.values(), *[1] * len(learned), *added.values()]
    # every three learned tokens share a score, in an order of their own
    order = random.Random(4).sample(range(len(learned)), len(learned))
    scores = [0.0] * len(special) + [-1.0 - i // 3 for i in order] + [0.0] * len(added)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
    }
    variants: list[dict[str, Any]] = [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
        {"general.name": "Phi-3 mini"},
    ]
    results = []
    for changes in variants:
        oracle = oracle_of(metadata | changes)
        eog = oracle.end_of_generation()
        results.append(
            {"metadata": changes, "eos_token_ids": eog, "ids": [oracle.both(text) for text in texts]}
        )
    return {"metadata": metadata, "texts": texts, "variants": results}


def oracle_of(metadata: Mapping[str, Any]) -> Oracle:
    with tempfile.TemporaryDirectory() as directory:
        return Oracle(write_gguf(Path(directory) / "vocabulary.gguf", metadata, {}))


def lines(value: Any, depth: int) -> str:
    """JSON with a line for each item of the outer `depth` levels, so that differences can be read."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    if isinstance(value, dict):
        body = ",\n".join(f"{json.dumps(key)}:{lines(item, depth - 1)}" for key, item in value.items())
        return "{\n" + body + "\n}"
    return "[\n" + ",\n".join(lines(item, depth - 1) for item in value) + "\n]"


def main() -> None:
    smollm2, gemma3 = sys.argv[1:]
    goldens = {
        "smollm2": real_model(smollm2),
        "gemma3": real_model(gemma3),
        "pre": pre_tokenizers(),
        "sentence_piece": sentence_piece(),
    }
    for name, golden in goldens.items():
        path = DATA / f"tokenizer_{name}.json"
        path.write_text(lines(golden, depth=2) + "\n", encoding="ascii")
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
