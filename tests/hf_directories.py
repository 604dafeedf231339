"""Small random Hugging Face directories, written by transformers, with a tokenizer.json of a tiny vocabulary.

Sizes are odd on purpose: head counts 3:1, a head size that is not hidden/heads, norm weights far from 1, a
vocabulary that is no multiple of 32.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CHAT_TEMPLATE, tokenizer_metadata
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = len(tokenizer_metadata()["tokenizer.ggml.tokens"])
WINDOW = 16
INDEX = "model.safetensors.index.json"
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# model_type -> class of transformers and what its config has beside the sizes
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1]}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3_text": (
        "Gemma3",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
}


def write_hf_directory(
    path: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> torch.nn.Module:
    """Writes the directory and returns its model in fp32 with eager attention."""
    name, extra = KINDS[kind]
    config_class = getattr(transformers, f"{name}TextConfig" if kind == "gemma3_text" else f"{name}Config")
    torch.manual_seed(5)
    config = config_class(**(_SIZES | extra | changes), attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    offset = 1.0 if kind == "gemma3_text" else 0.0
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.4 - offset, 1.6 - offset)
            elif parameter.ndim == 1:
                parameter.uniform_(-1, 1)
            else:
                parameter.normal_(
                    0, (4 if "embed" in parameter_name or "lm_head" in parameter_name else 1) / 10
                )
            # what a file of that dtype holds; buffers stay as they are
            parameter.copy_(parameter.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(path, max_shard_size=shard)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """tokenizer.json, tokenizer_config.json and a chat template of the vocabulary in ``tiny_models``."""
    metadata = tokenizer_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": tokens[1], "eos_token": {"content": tokens[2]}, "pad_token": tokens[0]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def edit(path: Path, **changes: object) -> None:
    """Sets entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of every safetensors file."""
    return {k: v for shard in sorted(directory.glob("*.safetensors")) for k, v in load_file(shard).items()}


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """``change`` edits the dict of all tensors, which then fill one file."""
    tensors = {name: tensor.clone() for name, tensor in load_all(directory).items()}
    for path in (*directory.glob("*.safetensors"), directory / INDEX):
        path.unlink(missing_ok=True)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
