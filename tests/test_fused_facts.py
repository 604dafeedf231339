"""What every architecture asks of the fused CPU step and prompt pass, and that the loss of it is noticed."""

import pytest
import torch
from arch_fixtures import TOLERANCE, golden, load
from fixture_models import MODELS
from torch import nn

import realizar_torch as rt
from realizar_torch.errors import CacheFullError
from realizar_torch.generation import cpu_step
from realizar_torch.generation.cpu_program import LayerProgram
from realizar_torch.generation.cpu_step import why_not
from realizar_torch.generation.step import decode_step, new_state, prefill
from realizar_torch.nn.experts import DenseExperts

pytest.importorskip("numba")

from realizar_torch.cpu_kernels import program

PROMPT = 45
# rows of 256 columns, few of them filled: of fixtures without matrices of 36 columns, which would stay dense
RAGGED = ["qwen2", "phi3-long", "granite", "olmo2", "gptneox", "starcoder2", "phi2", "command-r-norms"]
# fixture, instruction, operand, wrong value
MUTANTS = [
    ("gpt2", "EMBED", "second_weight", 0),
    ("granite", "EMBED", "scale", 1.0),
    ("granite", "ADD", "scale", 1.0),
    ("gemma2", "ADD", "gamma", 0),
    ("olmo2", "ADD", "gamma", 0),
    ("gpt2", "NORM", "centre", 0),
    ("command-r", "NORM", "centre", 0),
    ("llama", "NORM", "centre", 1),
    ("gpt2", "NORM", "bias", 0),
    ("llama", "NORM", "gamma", 0),
    ("qwen3", "NORM", "epsilon", 0.1),
    ("qwen2", "LINEAR", "bias", 0),
    ("granite", "LINEAR", "scale", 0.0),
    ("command-r", "LINEAR", "scale", 0.0),
    ("gemma2", "LINEAR", "softcap", 0.0),
    ("phi2", "GATED", "bias", 0),
    ("llama-linear", "GATED", "second_bias", 0),
    ("llama", "GATED", "second_weight", 0),
    ("llama", "GATED", "activation", program.GELU),
    ("gemma", "GATED", "activation", program.GELU),
    ("gpt2", "GATED", "activation", program.GELU),
    ("gptneox", "GATED", "activation", program.GELU_TANH),
    ("falcon", "GATED", "activation", program.GELU_TANH),
    ("mixtral", "GATED_EXPERTS", "activation", program.GELU),
    ("qwen3moe", "ROUTE", "experts", 3),
    ("qwen3moe", "ROUTE", "normalized", 0),
    ("qwen2moe", "ROUTE", "normalized", 1),
    ("qwen2moe", "MIX_EXPERTS", "used", 2),
    ("qwen2moe", "MIX_EXPERTS", "shared", 0),
    ("olmo2", "NORM_ROW", "width", 8),
    ("qwen3", "ROTATE", "gamma", 0),
    ("qwen3", "ROTATE", "second_gamma", 0),
    ("stablelm-parallel", "ROTATE", "gamma_stride", 0),
    ("command-r-norms", "ROTATE", "centre", 0),
    ("llama", "ROTATE", "rope", 0),
    ("smollm3", "ROTATE", "rope", 1),
    ("gpt2", "ROTATE", "rope", 1),
    ("gemma3", "ROTATE", "rope", 1),
    ("olmo3", "ROTATE", "rope", 1),
    ("mistral", "ATTEND", "window", 0),
    ("gemma2", "ATTEND", "softcap", 0.0),
    ("granite", "ATTEND", "scale", 8**-0.5),
]
# fixture, constant of the model, wrong value
CONSTANTS = [
    ("stablelm", "rotary", 2),
    ("phi3-long", "rotary", 2),
    ("mistral3", "temperature", 0.0),
    ("mistral3", "period", 64),
]


def packed(name, fmt, activations):
    model = load(name)
    rt.quantize_model(model, fmt, exclude=(), activations=activations)
    return model


def texts(name):
    """Two texts, the second behind padding, and their mask."""
    ids, _ = golden(name)
    batch = torch.cat((ids, ids.roll(-5)))
    mask = torch.ones_like(batch)
    batch[1, :13], mask[1, :13] = 0, 0
    return batch, mask


def run(model, batch, mask, fused_prompt):
    """Logits of the last tokens: of the prompt by the prompt pass or the modules, then token by token."""
    state = new_state(model, 2, batch.shape[1])
    with torch.inference_mode():
        logits = [prefill(model, batch[:, :PROMPT], mask[:, :PROMPT], state).clone()]
        assert why_not(model, state.cache) is None
        assert (state.prompt is not None) == fused_prompt
        logits += [decode_step(model, ids, state).clone() for ids in batch[:, PROMPT:].T]
    return torch.stack(logits, dim=1)


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.parametrize(
    ("name", "fmt"),
    [(name, "Q8_0") for name in MODELS] + [(name, "Q4_K") for name in RAGGED],
)
def test_packed_weights_decode_as_the_modules_do(name, fmt):
    """Whole and ragged rows: float ones exactly; int8 ones, with the prompt pass, as near as the modules."""
    exact_model, model = packed(name, fmt, "float"), packed(name, fmt, "int8")
    assert not any(isinstance(module, nn.Linear | DenseExperts) for module in model.layers.modules())
    batch, mask = texts(name)
    with torch.inference_mode():
        exact = exact_model(batch, mask).logits[:, PROMPT - 1 :]
        modules = model(batch, mask).logits[:, PROMPT - 1 :]
    assert (run(exact_model, batch, mask, False) - exact).abs().max() <= TOLERANCE
    assert rms(run(model, batch, mask, True) - exact) <= 1.3 * rms(modules - exact)


def deviation(name, change=lambda model: None):
    """Largest difference of the fused step's logits from transformers'; the modules have read the prompt.

    ``change`` is made to the model in between.
    """
    model, (ids, expected) = load(name), golden(name)
    state = new_state(model, 1, ids.shape[1])
    with torch.inference_mode():
        model(ids[:, :PROMPT], cache=state.cache)
        change(model)
        state.prepare(model)
        found = [decode_step(model, token, state).clone() for token in ids[:, PROMPT:].T]
    return (torch.stack(found, dim=1) - expected[:, PROMPT:]).abs().max()


@pytest.mark.parametrize(("name", "opcode", "operand", "wrong"), MUTANTS)
def test_a_lost_operand_is_noticed(name, opcode, operand, wrong, monkeypatch):
    emit, changed = LayerProgram.emit, []

    def emit_wrong(self, emitted, **operands):
        if emitted == opcode and operands.get(operand, 0) != wrong:
            operands[operand] = wrong
            changed.append(emitted)
        emit(self, emitted, **operands)

    assert deviation(name) <= TOLERANCE
    monkeypatch.setattr(LayerProgram, "emit", emit_wrong)
    assert not deviation(name) <= 2 * TOLERANCE
    assert changed


@pytest.mark.parametrize(("name", "constant", "wrong"), CONSTANTS)
def test_a_wrong_constant_is_noticed(name, constant, wrong, monkeypatch):
    fields = cpu_step.shared_fields
    monkeypatch.setattr(cpu_step, "shared_fields", lambda *args: fields(*args) | {constant: wrong})
    assert not deviation(name) <= 100 * TOLERANCE


def in_other_order(model):
    for layer in model.layers:
        layer.parallel = not layer.parallel


def without_magnitude(model):
    model.rope.magnitude = 1.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, in_other_order)
        for name in ("llama", "gptneox", "gptneox-sequential", "falcon", "stablelm-parallel")
    ]
    + [(name, without_magnitude) for name in ("qwen2", "phi3-long", "olmo3")],
)
def test_order_and_magnitude_are_honoured(name, change):
    assert deviation(name) <= TOLERANCE
    assert not deviation(name, change) <= 10 * TOLERANCE


def test_every_fact_has_a_mutant():
    """Operands that are facts of an architecture, not places or sizes."""
    places = {"opcode", "barrier", "source", "source_stride", "target", "target_stride", "padded", "rows"}
    places |= {"kernel", "int8", "weight", "row_bytes", "second_kernel", "second_int8", "second_row_bytes"}
    places |= {"panel", "kinds", "keys", "values"}
    assert set(program.INSTRUCTION.names) - places == {operand for _, _, operand, _ in MUTANTS}


def test_positions_that_were_not_learned_are_refused():
    """A cache may be longer than the table of positions."""
    model = load("gpt2")
    state = new_state(model, 1, 128)
    with torch.inference_mode():
        prefill(model, torch.zeros(1, 62, dtype=torch.int64), None, state)
        for _ in range(2):
            assert decode_step(model, torch.zeros(1, dtype=torch.int64), state).isfinite().all()
        with pytest.raises(CacheFullError, match="position 64 is outside the 64 "):
            decode_step(model, torch.zeros(1, dtype=torch.int64), state)
