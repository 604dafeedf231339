"""Mixtures of experts: conventions broken on purpose, older files, directories, life of the modules."""

import json

import pytest
import torch
from arch_fixtures import FIXTURES, TOLERANCE, deviation, golden, load, write_resized
from command_line import call
from fixture_models import MODELS, has_experts, make_model
from gguf_files import Typed, plain, write_gguf

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.errors import (
    CheckpointError,
    MissingTensorsError,
    UnsupportedArchitectureError,
)
from realizar_torch.models.config import ModelConfig
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.sources import open_source
from realizar_torch.models.tensors import check_tensors
from realizar_torch.nn import experts as mixture
from realizar_torch.nn.experts import MixtureOfExperts, QuantizedExperts

NAMES = [name for name in MODELS if has_experts(name)]


def mixtures(model: torch.nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize("name", NAMES)
def test_the_softmax_is_over_all_experts(name, monkeypatch):
    """Taken over the chosen ones it is the same as normalized weights, and nothing else."""

    def over_the_chosen(scores, used, normalized):
        best, experts = scores.topk(used)
        return best.softmax(-1), experts

    monkeypatch.setattr(mixture, "choose_experts", over_the_chosen)
    worst = deviation(load(name), name).max()
    assert (worst <= TOLERANCE) if name != "qwen2moe" else (worst > 2 * TOLERANCE)


def test_weights_of_experts():
    """Scores ln 1, ln 2, ln 4, ln 1 are 1/8, 2/8, 4/8, 1/8 of all."""
    scores = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log()
    weights, experts = mixture.choose_experts(scores, 2, False)
    assert experts.tolist() == [[2, 1]]
    assert torch.allclose(weights, torch.tensor([[0.5, 0.25]]))
    assert torch.allclose(mixture.choose_experts(scores, 2, True)[0], torch.tensor([[2 / 3, 1 / 3]]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["router", "experts.gate_proj", "experts.up_proj", "experts.down_proj"])
def test_another_order_of_experts_is_noticed(name, part):
    model = load(name)
    weight = model.layers[1].mlp.get_submodule(part).weight
    weight.data = weight.data.roll(1, 0)
    assert deviation(model, name).max() > 2 * TOLERANCE


class Open(torch.nn.Module):
    """A gate whose sigmoid is 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x[..., :1], 100.0)


@pytest.mark.parametrize("change", ["no gate", "no expert", "twice"])
def test_a_shared_expert_treated_otherwise_is_noticed(change):
    model = load("qwen2moe")
    for layer in mixtures(model):
        if change == "no expert":
            layer.shared_expert = None
        elif change == "no gate":
            layer.shared_gate = Open()
        else:
            layer.shared_expert.down_proj.weight.data *= 2
    assert deviation(model, "qwen2moe").max() > 2 * TOLERANCE


def test_old_files_tell_the_size_of_all_used_experts():
    """Without expert_feed_forward_length: 60 for all three used experts."""
    keys = {"qwen2moe.expert_feed_forward_length": None, "qwen2moe.feed_forward_length": 60}
    model = load("qwen2moe", keys)
    assert deviation(model, "qwen2moe").max() <= TOLERANCE
    with pytest.raises(MissingTensorsError, match=r"ffn_gate_exps.weight has shape \[5, 24, 36\]"):
        load("mixtral", {"llama.feed_forward_length": 48})


@pytest.mark.parametrize("normalized", [True, False])
def test_a_file_may_tell_whether_weights_are_normalized(normalized):
    model = load("qwen2moe", {"qwen2moe.expert_weights_norm": normalized})
    assert (deviation(model, "qwen2moe").max() <= TOLERANCE) is not normalized


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"expert_gating_func": 2}, UnsupportedArchitectureError, "only the softmax over all experts"),
        ({"expert_group_count": 4}, UnsupportedArchitectureError, "only no groups"),
        ({"expert_weights_scale": 2.5}, UnsupportedArchitectureError, "expert_weights_scale = 2.5"),
        ({"expert_used_count": 9}, ValueError, "9 experts are to be used of 6"),
        ({"expert_count": 0}, ValueError, "expert_count is 0"),
        ({"expert_count": None}, ValueError, "expert_count"),
    ],
)
def test_other_ways_to_choose_are_refused(changes, error, sentence):
    with pytest.raises(error, match=sentence):
        load("qwen3moe", {f"qwen3moe.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    "lost",
    ["ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight", "ffn_gate_inp_shexp.weight"],
)
def test_a_lost_tensor_is_named(lost):
    file = open_gguf(FIXTURES / "qwen2moe.gguf")
    tensors = {name: plain(file.read(name).clone()) for name in file.tensors if name != f"blk.1.{lost}"}
    with pytest.raises(MissingTensorsError, match=rf"missing blk.1.{lost}"):
        check_tensors(
            {name: info for name, info in file.tensors.items() if name in tensors},
            ModelConfig.from_gguf(file.metadata),
            "m",
        )


def old_file(
    folder, path=FIXTURES / "mixtral.gguf", *, lost: str | None = None, odd: str | None = None, **changes
):
    """The model as llama.cpp wrote it in 2023: a tensor for each expert. odd: one of another type."""
    file, tensors = open_gguf(path), {}
    for name, info in file.tensors.items():
        values, split = file.read(name), "_exps" in name
        for number, part in enumerate(values if split else [values]):
            key = name.replace("_exps", f".{number}")
            stored = (info.fmt.name, info.shape[1:] if split else info.shape, part.numpy().tobytes())
            tensors[key] = stored if key != odd else plain(part.float())
    tensors.pop(lost, None)
    keys = {key: _writable(value) for key, value in file.metadata.items()} | changes
    return write_gguf(folder / "old.gguf", keys, tensors)


def _writable(value):
    if isinstance(value, str | int | float):
        return value
    items = list(value)
    return items if isinstance(items[0], str) else Typed("i32", items)


def test_old_files_with_a_tensor_for_each_expert(tmp_path, capsys):
    path = old_file(tmp_path)
    model, _ = rt.load(path, activations="float")
    assert deviation(model, "mixtral").max() <= TOLERANCE
    code, out, _ = call(capsys, "check", "-m", path)
    assert (code, "would load" in out) == (0, True)
    code, out, _ = call(capsys, "info", "-m", path, "--json")
    shapes = {tensor["name"]: tensor["shape"] for tensor in json.loads(out)["tensors"]}
    assert shapes["blk.1.ffn_down_exps.weight"] == [5, 36, 24]


def test_old_files_do_not_tell_their_window_either(tmp_path, capsys):
    code, out, _ = call(capsys, "check", "-m", old_file(tmp_path, **{"llama.context_length": 32768}))
    assert code == 0 and "some llama models have a sliding window" in out


def load_float(path):
    return load_transformer(
        open_source(path), device=torch.device("cpu"), dtype=torch.float32, activations="float"
    )


def test_packed_experts_of_old_files(tmp_path):
    path, ids = write_resized(tmp_path, "mixtral", "Q8_0")[0], golden("mixtral")[0]
    with torch.inference_mode():
        old, new = load_float(old_file(tmp_path, path)), load_float(path)
        assert isinstance(old.layers[0].mlp.experts.up_proj, QuantizedExperts)
        assert torch.equal(old(ids).logits, new(ids).logits)


def test_old_files_that_are_not_whole(tmp_path):
    with pytest.raises(MissingTensorsError, match=r"missing blk.1.ffn_up.3.weight of 5 experts"):
        open_source(old_file(tmp_path, lost="blk.1.ffn_up.3.weight"))
    with pytest.raises(MissingTensorsError, match=r"blk.1.ffn_up_exps.weight has shape \[4, 24, 36\]"):
        rt.load(old_file(tmp_path, lost="blk.1.ffn_up.4.weight"))
    with pytest.raises(CheckpointError, match=r"ffn_up.3.weight.*F32 \[24, 36\].*F16 \[24, 36\]"):
        open_source(old_file(tmp_path, odd="blk.1.ffn_up.3.weight"))


def test_dense_layers_among_mixtures(tmp_path):
    """mlp_only_layers and decoder_sparse_step of transformers: the tensors tell which layers are which."""
    import fixture_models

    stem, entries = MODELS["qwen3moe"]
    fixture_models.MODELS["sparse"] = (stem, entries | {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    try:
        reference = make_model("sparse")
    finally:
        del fixture_models.MODELS["sparse"]
    reference.save_pretrained(tmp_path)
    model, _ = rt.load(tmp_path, activations="float", tokenizer=FIXTURES / "qwen3moe.gguf")
    assert [isinstance(layer.mlp, MixtureOfExperts) for layer in model.layers] == [False, True, False, True]
    ids = golden("qwen3moe")[0]
    with torch.inference_mode():
        assert (model(ids).logits - reference(ids).logits).abs().max() <= TOLERANCE


def test_a_directory_tells_whether_weights_are_normalized(tmp_path):
    """norm_topk_prob, which the GGUF file of the same model would not tell; missing, it is false."""
    reference = make_model("qwen3moe")
    ids = golden("qwen3moe")[0]
    for stated in (True, False, None):
        reference.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"norm_topk_prob": stated}
        kept = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        for layer in reference.model.layers:
            layer.mlp.gate.norm_topk_prob = bool(stated)
        model, _ = rt.load(tmp_path, activations="float", tokenizer=FIXTURES / "qwen3moe.gguf")
        with torch.inference_mode():
            assert (model(ids).logits - reference(ids).logits).abs().max() <= TOLERANCE
