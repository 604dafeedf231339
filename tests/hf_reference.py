"""Reference logits: transformers in fp32, with the weights of a GGUF file decoded by the ``gguf`` package."""

from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize

from realizar_torch.checkpoint.gguf import open_gguf

# A prompt in the words of ``tiny_models`` and options of ``generate`` that leave nothing to chance.
TEXT = "the cat and the other"
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_NAMES = _LLAMA_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def reference_model(path: Path, layer_order: list[int] | None = None) -> torch.nn.Module:
    """A transformers model in fp32 with eager attention; ``layer_order`` permutes the file's layers."""
    file = open_gguf(path)
    meta = file.metadata
    arch = meta["general.architecture"]
    sizes = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": meta[f"{arch}.embedding_length"],
        "intermediate_size": meta[f"{arch}.feed_forward_length"],
        "num_hidden_layers": meta[f"{arch}.block_count"],
        "num_attention_heads": meta[f"{arch}.attention.head_count"],
        "num_key_value_heads": meta[f"{arch}.attention.head_count_kv"],
        "rms_norm_eps": meta[f"{arch}.attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": meta[f"{arch}.context_length"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attn_implementation": "eager",
    }
    model = (
        _gemma3(meta, sizes) if arch == "gemma3" else _llama(meta, sizes, "blk.0.attn_q.bias" in file.tensors)
    )
    names = _GEMMA3_NAMES if arch == "gemma3" else _LLAMA_NAMES
    order = layer_order or list(range(sizes["num_hidden_layers"]))

    state = {}
    for name, info in file.tensors.items():
        if name == "rope_freqs.weight":
            model.model.rotary_emb.inv_freq /= file.read(name)
            continue
        values = torch.from_numpy(dequantize(_raw(file, name), gguf.GGMLQuantizationType[info.fmt.name]))
        values = values.reshape(info.shape)
        stem, kind = name.rsplit(".", 1)
        if arch == "llama" and stem.endswith(("attn_q", "attn_k")):
            heads = sizes["num_attention_heads" if stem.endswith("attn_q") else "num_key_value_heads"]
            values = (
                values.view(heads, info.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(info.shape)
            )
        if arch == "gemma3" and stem.endswith("norm"):
            values = values - 1
        if stem.startswith("blk."):
            _, layer, tensor = stem.split(".")
            state[f"model.layers.{order.index(int(layer))}.{names[tensor]}.{kind}"] = values
        else:
            state[f"{_MODEL_NAMES[stem]}.{kind}"] = values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def _raw(file, name):
    tensor = file.read(name)
    return tensor.contiguous().view(torch.uint8).numpy()


def _llama(meta, sizes, biased):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]}
    head_dim = meta.get("llama.attention.key_length", sizes["hidden_size"] // sizes["num_attention_heads"])
    biases = {"attention_bias": biased, "mlp_bias": biased}
    return LlamaForCausalLM(LlamaConfig(**sizes, **biases, head_dim=head_dim, rope_parameters=rope))


def _gemma3(meta, sizes):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": meta["gemma3.rope.freq_base"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = Gemma3TextConfig(
        **sizes,
        rope_parameters=rope,
        head_dim=meta["gemma3.attention.key_length"],
        query_pre_attn_scalar=meta["gemma3.attention.key_length"],
        sliding_window=meta["gemma3.attention.sliding_window"],
    )
    return Gemma3ForCausalLM(config)
