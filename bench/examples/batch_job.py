"""An offline job: more prompts than rows, every one with settings of its own, answers as they come.

python bench/examples/batch_job.py [MODEL]

MODEL is a GGUF file; without one the command line's demo model is taken.
"""

import sys
import time

import torch

import realizar_torch as rt
from realizar_torch.cli.demo_model import demo_model

CITIES = ("France", "Italy", "Japan", "Spain", "Egypt", "Peru", "Kenya", "Norway", "Austria", "Greece")


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else demo_model(sys.stderr)
    model, tokenizer = rt.load(path)

    batch = rt.BatchedGenerator(model, max_batch=4, max_seq_len=256)
    asked = {}
    for number, city in enumerate(CITIES):
        messages = [{"role": "user", "content": f"What is the capital of {city}?"}]
        creative = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if number % 2 else {}
        generator = torch.Generator(model.device).manual_seed(number)
        options = {"max_new_tokens": 24, "generator": generator} | creative
        asked[batch.add(messages, tokenizer=tokenizer, **options)] = city

    started, tokens = time.perf_counter(), 0
    for done in batch:
        tokens += len(done.token_ids)
        print(f"{asked[done.id]:8} {done.reason:6} {(done.text or '').strip()!r}")
    print(f"{len(asked)} answers, {tokens / (time.perf_counter() - started):.0f} tokens per second")

    try:
        batch.add([1] * 200, max_new_tokens=100)
    except rt.CacheFullError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
