"""Random requests for batches of a tiny model, each the same for the same number."""

import pytest
import random_models
import torch

import realizar_torch as rt

VOCAB_IDS = (3, 250)


def load(folder, device, activations="int8"):
    """A llama of two layers, packed throughout."""
    path = folder / "batch.gguf"
    if not path.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_models, "LAYERS", 2)
            random_models.write_random_model(path, "llama", fmt="Q8_0", tied=False)
    return rt.load(path, device=device, dtype="float32", activations=activations)[0]


def job(number, device, longest=60):
    """Prompt and options of request ``number``: length, greedy or not, filters, penalty, all its own."""
    generator = torch.Generator().manual_seed(1000 + number)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    length = int(torch.randint(1, longest, (1,), generator=generator))
    prompt = torch.randint(*VOCAB_IDS, (length,), generator=generator).tolist()
    options = {"max_new_tokens": pick(1, 2, 5, 13, 24), "repetition_penalty": pick(1.0, 1.0, 1.3)}
    if pick(True, False):
        options |= {"do_sample": True, "temperature": pick(0.7, 1.0, 1.4), "top_k": pick(0, 5, 40)}
        options |= {"top_p": pick(1.0, 0.9), "min_p": pick(0.0, 0.05)}
        options["generator"] = torch.Generator(device).manual_seed(number)
    if pick(True, False, False):
        # ends early, at whatever token comes often
        options["eos_token_id"] = list(range(3, 250, 9))
    else:
        options["eos_token_id"] = []
    return prompt, options


def add(batch, number, device, longest=60):
    prompt, options = job(number, device, longest)
    return batch.add(prompt, **options)


def run(model, numbers, device, max_batch, max_seq_len=None, longest=60):
    """Request number -> (tokens, reason), all given to one batch in this order."""
    batch = rt.BatchedGenerator(model, max_batch=max_batch, max_seq_len=max_seq_len)
    numbers = list(numbers)
    for number in numbers:
        add(batch, number, device, longest)
    return {numbers[done.id]: (done.token_ids, done.reason) for done in batch}
