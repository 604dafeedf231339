"""Each convention broken on purpose, one at a time, leads away from transformers' logits or is refused."""

from dataclasses import fields, replace

import pytest
from arch_fixtures import FIXTURES, TOLERANCE, deviation, load

from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import MissingTensorsError, UnsupportedArchitectureError
from realizar_torch.models import config as reading
from realizar_torch.models import loading
from realizar_torch.models.arch import ARCHITECTURES, QUERY_KEY_VALUE, ArchSpec
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.experts import Experts
from realizar_torch.models.rope_scaling import RopeScaling

# fact of a row -> (fixture, wrong value)
ROW_MUTANTS = {
    "normalization": [("llama", "layernorm"), ("command-r", "rmsnorm")],
    "norm_bias": [("gpt2", False), ("command-r", True)],
    "pre_norms": [("gemma2", False), ("olmo2", True)],
    "post_norms": [("gemma2", False), ("gemma3", False), ("olmo2", False)],
    "parallel_residual": [("gptneox", False), ("llama", True), ("starcoder2", True)],
    "mlp_norm": [("phi2", "own"), ("falcon", "own"), ("stablelm", "shared"), ("stablelm-parallel", "own")],
    "qk_norm": [("qwen3", None), ("qwen3", "whole"), ("olmo2", "head"), ("command-r-norms", None)],
    "interleaved_qk": [
        *((name, False) for name in ("llama", "smollm3", "granite", "command-r", "command-r-norms")),
        *((name, False) for name in ("internlm2", "mistral3")),
        *((name, True) for name in ("qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "stablelm")),
    ],
    "biases": [("llama", QUERY_KEY_VALUE), ("falcon", ("mlp.up_proj",)), ("gpt2", ("lm_head",))],
    "rotary_pattern": [("llama", (False,)), ("smollm3", (True,)), ("smollm3", (True, False, True, True))],
    "rope_theta": [(name, 9000.0) for name in ("gemma", "gemma2", "phi2", "gptneox", "stablelm", "falcon")],
    "sliding_pattern": [("mistral", ()), ("phi3", ()), ("gemma2", (False, True)), ("gemma3", (True,))],
    "local_rope": [("gemma3", False), ("olmo3", False)],
    "width_scaled_layers": [("gemma2", 3), ("gemma3", 6)],
    "activation": [
        *(("llama", other) for other in ("gelu", "gelu_tanh")),
        *(("gemma", other) for other in ("silu", "gelu")),
        *(("gpt2", other) for other in ("silu", "gelu")),
        *(("gptneox", other) for other in ("silu", "gelu_tanh")),
        *(("falcon", other) for other in ("silu", "gelu_tanh")),
        *(("phi2", other) for other in ("silu", "gelu")),
        *(("starcoder2", other) for other in ("silu", "gelu")),
    ],
    "gated": [("llama", False), ("gpt2", True)],
    "fused_gate_up": [("phi3", False), ("llama", True)],
    "learned_positions": [("gpt2", False), ("gptneox", True)],
    "scale_embedding": [("gemma", False), ("gemma2", False), ("gemma3", False), ("llama", True)],
    "logit_scale": [("granite", "multiplies"), ("command-r", "divides")],
    "experts": [(name, None) for name in ("mixtral", "qwen2moe", "qwen3moe")],
    "normalized_experts": [("mixtral", False), ("qwen2moe", True), ("qwen3moe", False)],
    "shared_expert": [("qwen2moe", False), ("qwen3moe", True)],
}
# defaults of a row for keys that files may lack -> (fixture, the key, its value in the file, a wrong value)
DEFAULT_MUTANTS = {
    "sliding_window": ("gemma2", "gemma2.attention.sliding_window", 16, 15),
    "attention_softcap": ("gemma2", "gemma2.attn_logit_softcapping", 3.0, 0.0),
    "final_softcap": ("gemma2", "gemma2.final_logit_softcapping", 5.0, 0.0),
    "local_rope_theta": ("gemma3", "gemma3.rope.freq_base_swa", 10_000.0, 9000.0),
}
# what a file tells -> (fixture, wrong value)
CONFIG_MUTANTS = {
    "norm_eps": [("qwen3", 0.1), ("gpt2", 0.1)],
    "rope_theta": [("llama", 9000.0), ("gemma3", 10_000.0)],
    "rotary_dim": [("phi3-long", 8), ("stablelm", 8), ("gptneox", 8), ("phi2", 8), ("llama", 8)],
    "rope_scaling": [
        ("llama-linear", RopeScaling()),
        ("llama-linear", RopeScaling(yarn=4.0, original_length=64)),
        ("qwen2", RopeScaling()),
        ("qwen2", RopeScaling(factor=4.0)),
        ("gemma3", RopeScaling()),
    ],
    "rope_scaling.yarn": [("qwen2", 4.4), ("olmo3", 4.4), ("mistral3", 4.4)],
    "rope_scaling.factor": [("llama-linear", 4.4), ("gemma3", 8.8)],
    "rope_scaling.beta_fast": [("mistral3", 32.0)],
    "rope_scaling.beta_slow": [("mistral3", 1.0)],
    "rope_scaling.magnitude": [("qwen2", 1.0), ("olmo3", 1.0), ("phi3-long", 1.0), ("mistral3", 1.14)],
    "rope_scaling.original_length": [("qwen2", 16), ("mistral3", 64)],
    "attention_scale": [("granite", 8**-0.5), ("llama", 6**-0.5), ("gemma2", 16**-0.5)],
    "local_rope_theta": [("gemma3", None), ("olmo3", 900.0)],
    "sliding_window": [
        (name, size) for name in ("mistral", "phi3", "gemma2", "gemma3", "olmo3") for size in (15, 17)
    ],
    "sliding_pattern": [("olmo3", (True, False, False)), ("olmo3", (True,))],
    "parallel_residual": [("gptneox-sequential", True), ("gptneox", False)],
    "temperature": [("mistral3", 0.0), ("mistral3", 0.5)],
    "embedding_scale": [("granite", 1.0), ("gemma", 1.0)],
    "residual_scale": [("granite", 1.0)],
    "logit_scale": [("granite", 1.0), ("command-r", 1.0)],
    "attention_softcap": [("gemma2", 0.0), ("gemma2", 50.0)],
    "final_softcap": [("gemma2", 0.0), ("gemma2", 30.0)],
    "experts": [("mixtral", None), ("qwen3moe", None)],
    "experts.count": [("mixtral", 4), ("qwen2moe", 6)],
    "experts.used": [("mixtral", 1), ("mixtral", 3), ("qwen2moe", 2), ("qwen3moe", 1)],
    "experts.inner_size": [("mixtral", 23)],
    "experts.shared_size": [("qwen2moe", 0)],
    "experts.normalized": [("mixtral", False), ("qwen2moe", True), ("qwen3moe", False)],
}
# sizes: tensors of another shape are refused (test_models)
SIZES = {"arch", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"}
SIZES |= {"head_dim", "context_length"}


def test_every_fact_is_broken_by_some_test():
    facts = {field.name for field in fields(ArchSpec)} - {"name", "hidden_window"}
    # test_experts: the size that old files tell
    assert facts == ROW_MUTANTS.keys() | DEFAULT_MUTANTS.keys() | {"split_experts"}
    assert {field.name for field in fields(ModelConfig)} - SIZES == {
        name for name in CONFIG_MUTANTS if "." not in name
    }
    assert {f"rope_scaling.{field.name}" for field in fields(RopeScaling)} <= CONFIG_MUTANTS.keys()
    assert {f"experts.{field.name}" for field in fields(Experts)} <= CONFIG_MUTANTS.keys()


def is_noticed(name: str) -> bool:
    """Whether the file is refused or its logits differ by far more than rounding."""
    file = open_gguf(FIXTURES / f"{name}.gguf")
    # no reader shall fail for want of a key that only its mistake makes it look for
    epsilons = {f"{file.arch}.attention.layer_norm_{kind}": 1e-5 for kind in ("epsilon", "rms_epsilon")}
    missing = {key: value for key, value in epsilons.items() if key not in file.metadata}
    try:
        worst = deviation(load(name, missing), name).max()
    except (MissingTensorsError, UnsupportedArchitectureError):
        return True
    return bool(worst > 2 * TOLERANCE)


@pytest.mark.parametrize(
    ("fact", "name", "value"),
    [(fact, *mutant) for fact, mutants in ROW_MUTANTS.items() for mutant in mutants],
)
def test_a_wrong_fact_in_a_row_is_noticed(fact, name, value, monkeypatch):
    def mutant(arch, source):
        row = ARCHITECTURES[arch]
        assert getattr(row, fact) != value
        return replace(row, **{fact: value})

    monkeypatch.setattr(reading, "get_arch", mutant)
    assert is_noticed(name)


@pytest.mark.parametrize("fact", DEFAULT_MUTANTS)
def test_a_default_of_a_row_stands_for_a_missing_key(fact, monkeypatch):
    name, key, value, wrong = DEFAULT_MUTANTS[fact]
    for default, same in ((value, True), (wrong, False)):
        row = replace(ARCHITECTURES[name], **{fact: default})
        monkeypatch.setattr(reading, "get_arch", lambda arch, source, row=row: row)
        worst = deviation(load(name, {key: None}), name).max()
        assert (worst <= TOLERANCE) if same else (worst > 2 * TOLERANCE)


@pytest.mark.parametrize(
    ("fact", "name", "value"),
    [(fact, *mutant) for fact, mutants in CONFIG_MUTANTS.items() for mutant in mutants],
)
def test_a_wrong_constant_is_noticed(fact, name, value, monkeypatch):
    class Mutant:
        @staticmethod
        def from_gguf(metadata, source):
            config = ModelConfig.from_gguf(metadata, source)
            if "." in fact:
                owner, name = fact.split(".")
                part = replace(getattr(config, owner), **{name: value})
                return replace(config, **{owner: part})
            assert getattr(config, fact) != value
            return replace(config, **{fact: value})

    monkeypatch.setattr(loading, "ModelConfig", Mutant)
    assert is_noticed(name)
