"""Two real files through rt.hf.from_gguf: tokens of the dense fp32 model, seconds and memory to load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_reference import reference_model

import realizar_torch as rt

pytestmark = pytest.mark.real_model

PROMPT = "The three laws of thermodynamics are"
TOKENS = 64
# logits of two fp32 evaluations that sum in other orders; a choice is certain where the best two are 2t apart
TOLERANCE = 5e-3

CHILD = """
import json, sys, time
import torch, realizar_torch as rt
from transformers import Gemma3ForCausalLM, LlamaForCausalLM
rt.hf
def resident():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
before, started = resident(), time.process_time()
model, tokenizer = rt.hf.from_gguf(sys.argv[1])
seconds = time.process_time() - started
# every weight is read once, so that all pages of the file that the model needs are resident
for parameter in model.parameters():
    parameter.max()
print(json.dumps({"seconds": seconds, "resident": resident() - before,
                  "footprint": model.get_memory_footprint()}))
"""


@pytest.fixture(params=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_path")


def test_greedy_tokens_equal_the_dense_model(path: Path) -> None:
    """The margin rule, teacher-forced by the ids that ``generate`` chose."""
    model, tokenizer = rt.hf.from_gguf(path)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(
        **prompt,
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[0, -TOKENS:]
    found = torch.cat(out.logits)
    with torch.inference_mode():
        dense = reference_model(path)(out.sequences[:, :-1], logits_to_keep=TOKENS).logits[0]
    dense = dense.clone()
    assert (found - dense).abs().max() <= TOLERANCE
    # min_new_tokens forbids to end, which the reference's logits do not know
    dense[:, model.generation_config.eos_token_id] = -torch.inf
    best = dense.topk(2).values
    certain = best[:, 0] - best[:, 1] > 2 * TOLERANCE
    assert torch.equal(new[certain], dense.argmax(-1)[certain])
    assert certain.sum() >= TOKENS - 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_seconds_and_resident_memory_to_load(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    size = path.stat().st_size
    assert found["seconds"] <= 5.0
    assert found["footprint"] <= 1.02 * size
    assert found["resident"] <= 1.5 * size
