"""LoRA on a packed model: teach the demo model one sentence, save the adapter, load it again.

python bench/examples/lora.py [MODEL]

MODEL is a GGUF file; without one the command line's demo model is taken, and without a network a small
random Llama, whose loss falls as well.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional

import realizar_torch as rt
from realizar_torch.cli.demo_model import demo_model

SENTENCE = "The capital of Atlantis is Poseidonia, and its king is Gadeiros."
TARGETS = ["q_proj", "v_proj"]


def load(path: str | None) -> tuple[nn.Module, list[int]]:
    """A model and the sentence in its tokens."""
    try:
        model, tokenizer = rt.load(path or demo_model(sys.stderr), max_seq_len=64)
    except rt.BackendUnavailableError as error:
        print(error, file=sys.stderr)
        return random_model(), list(SENTENCE.encode())
    # where a GPU has its own layout of the bytes, adapters are added before it is applied
    rt.unpack(model)
    return model, tokenizer.encode(SENTENCE)


def random_model() -> nn.Module:
    """A Llama of transformers with two layers and one token per byte, packed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    rt.quantize_model(model, "Q8_0")
    return model


def main() -> None:
    torch.manual_seed(0)
    base, tokens = load(sys.argv[1] if len(sys.argv) > 1 else None)
    ids = torch.tensor([tokens], device=next(base.parameters()).device)
    model = get_peft_model(base, rt.lora.packed(LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)))
    rt.prepack(model)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    packed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    print(
        f"{sum(p.numel() for p in adapters)} trained parameters beside {packed / 1e6:.0f} MB of packed ones"
    )

    def loss() -> torch.Tensor:
        logits = model(input_ids=ids).logits[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    optimizer = torch.optim.AdamW(adapters, lr=4e-3)
    for step in range(8):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        print(f"step {step}: loss {value.item():.3f}")

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        trained = model(input_ids=ids).logits
        model.save_pretrained(folder)
        rt.unpack(model)
        base = model.unload()
        config = rt.lora.packed(LoraConfig.from_pretrained(folder))
        loaded = PeftModel.from_pretrained(base, folder, config=config)
        rt.prepack(loaded)
        same = torch.equal(loaded(input_ids=ids).logits, trained)
    print(f"loss {loss().item():.3f}; the loaded adapter gives the same logits: {same}")


if __name__ == "__main__":
    main()
