"""A GGUF file in a transformers script: chat, stream, pipeline, save, load. The weights stay packed.

python bench/examples/hf_generate.py [MODEL]

MODEL is a GGUF file; without one the command line's demo model is taken.
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

import realizar_torch as rt
from realizar_torch.cli.demo_model import demo_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo_model(sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = rt.hf.from_gguf(path, device_map=device)
    print(f"{type(model).__name__} in {model.get_memory_footprint() / 1e6:.0f} MB")
    print(model.model.layers[0].mlp)

    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model.generate(
        **inputs.to(device), max_new_tokens=24, do_sample=False, streamer=TextStreamer(tokenizer, True)
    )

    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    print(writer("The three primary colours are", max_new_tokens=12, do_sample=False)[0]["generated_text"])

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # a script that only loads this folder has to import realizar_torch.hf first
        again = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
        ids = AutoTokenizer.from_pretrained(folder)("Once upon a time", return_tensors="pt").to(device)
        with torch.inference_mode():
            print("saved and loaded, logits equal:", torch.equal(again(**ids).logits, model(**ids).logits))


if __name__ == "__main__":
    main()
