"""save_pretrained and from_pretrained of transformers models with packed weights, and what they refuse."""

import copy
import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import write_gguf
from hf_directories import change_tensors, write_hf_directory
from hf_reference import GREEDY, TEXT
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_metadata, tiny_tensors
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

import realizar_torch as rt
from realizar_torch.errors import CheckpointError, FormatError, MissingTensorsError
from realizar_torch.models.saved_format import FORMATS_KEY
from realizar_torch.nn.layout import PackedModule


def write_tied(path: Path) -> Path:
    tensors = {name: value for name, value in tiny_tensors().items() if name != "output.weight"}
    return write_gguf(path, tiny_metadata(), tensors)


def saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def content(folder: Path) -> tuple[Any, bytes]:
    """The file's header, whose metadata safetensors puts in any order, and all behind it."""
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def test_saved_and_loaded_is_byte_equal(tiny_hf: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny_hf
    saved(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "realizar" and config["formats"]["model.layers.0.mlp.up_proj"] == "Q4_K"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    prompt = AutoTokenizer.from_pretrained(tmp_path)(TEXT, return_tensors="pt")
    assert torch.equal(again.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY))
    # a second generation of files is the same, byte for byte
    again.save_pretrained(tmp_path / "again")
    names = ("config.json", "generation_config.json")
    assert all((tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    assert content(tmp_path) == content(tmp_path / "again")


def test_tied_weights_are_saved_once_and_tied_again(tmp_path: Path) -> None:
    tied = write_tied(tmp_path / "tied.gguf")
    model, tokenizer = rt.hf.from_gguf(tied)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved(model, tokenizer, tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("of", "options"),
    [
        ({}, {"fmt_or_plan": "Q8_0"}),
        ({"kind": "gemma3_text"}, {"fmt_or_plan": "Q4_K", "activations": "int8"}),
        ({"tie_word_embeddings": True}, {"fmt_or_plan": "Q5_0", "exclude": ()}),
    ],
    ids=str,
)
def test_what_quantize_model_packed_is_saved_and_loaded(
    of: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    model = write_hf_directory(tmp_path / "dense", **of)
    rt.quantize_model(model, **options)
    model.config.quantization_config = rt.hf.RealizarConfig.from_model(model)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert isinstance(again.model.layers[0].mlp.up_proj, rt.QuantizedLinear)
    assert again.model.layers[0].mlp.up_proj.activations == options.get("activations", "float")


@pytest.mark.parametrize("kept", [0, 2])
def test_a_merged_model_is_saved_as_it_is_then(tiny_path: Path, tmp_path: Path, kept: int) -> None:
    """Whether layers that are still packed remain or none."""
    base, _ = rt.hf.from_gguf(tiny_path, dtype=torch.float32)
    if not kept:
        table = base.get_input_embeddings()
        rows = table(torch.arange(table.num_embeddings))
        base.set_input_embeddings(torch.nn.Embedding.from_pretrained(rows))
        base.lm_head = base.lm_head.to_linear()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, rt.lora.packed(LoraConfig(target_modules=names, init_lora_weights=False)))
    rt.lora.dequantize(model)
    merged = model.merge_and_unload()
    for _ in range(2):
        merged.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text()).get("quantization_config", {})
    assert len(entry.get("formats", ())) == kept
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, merged(ids).logits)


@pytest.mark.parametrize("options", [{}, {"save_original_format": False}], ids=str)
def test_mixtures_of_dense_experts_are_saved_and_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    """transformers stacks the experts that it stores one by one."""
    torch.manual_seed(2)
    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, vocab_size=50,
        )
    )  # fmt: skip
    rt.quantize_model(model, "Q4_0")
    model.config.quantization_config = rt.hf.RealizarConfig.from_model(model)
    model.save_pretrained(tmp_path, **options)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "experts" in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingTensorsError, match=gone if options else r"missing .*experts\.0\.w1\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_models_that_no_entry_describes_are_refused() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(256, 8), torch.nn.Linear(256, 8))
    with pytest.raises(FormatError, match="the Sequential has no packed modules"):
        rt.hf.RealizarConfig.from_model(layers)
    for name, activations in (("0", "float"), ("1", "int8")):
        rt.quantize_model(layers, {name: "Q8_0"}, activations=activations)
    with pytest.raises(FormatError, match=r"activations \['float', 'int8'\], expected one"):
        rt.hf.RealizarConfig.from_model(layers)


def test_shards_int8_and_another_dtype_survive(tiny_path: Path, tmp_path: Path) -> None:
    model, _ = rt.hf.from_gguf(tiny_path, activations="int8")
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.model.layers[0].mlp.up_proj.activations == "int8"
    assert again.model.embed_tokens.dtype == again.model.norm.weight.dtype == torch.bfloat16
    ids = torch.arange(9)[None]
    half, _ = rt.hf.from_gguf(tiny_path, activations="int8", dtype=torch.bfloat16)
    assert torch.equal(again(ids).logits, half(ids).logits)


def test_other_heads_share_the_packed_body(tiny_hf: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny_hf
    saved(model, tokenizer, tmp_path)
    ids = torch.arange(9)[None]
    body = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(classifier.model.layers[0].mlp.up_proj, rt.QuantizedLinear)


@pytest.mark.parametrize("key", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_without_a_tensor_is_refused(key: str, tiny_hf: tuple[Any, Any], tmp_path: Path) -> None:
    saved(*tiny_hf, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensorsError, match=f"missing {key}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_that_says_another_format_is_refused(tiny_hf: tuple[Any, Any], tmp_path: Path) -> None:
    saved(*tiny_hf, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["formats"]["model.layers.0.mlp.up_proj"] = "Q8_0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    # as directories of older versions, which do not tell the formats beside the tensors
    change_tensors(tmp_path, lambda tensors: None)
    with pytest.raises(
        MissingTensorsError, match=r"up_proj\.weight has shape \[512, 144\], expected \[512, 272\]"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("head", [AutoModelForCausalLM, AutoModel])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formats": None}, "formats None, expected the format of each packed module"),
        ({"formats": ...}, "formats None"),
        ({"formats": ["Q8_0"]}, r"formats \['Q8_0'\]"),
        ({"formats": {"lm_head": "Q4_X"}}, "lm_head has the format 'Q4_X', expected one of Q4_0"),
        ({"formats": {"lm_head": ["Q4_0"]}}, r"lm_head has the format \['Q4_0'\]"),
        ({"formats": {"lm_head": "F32"}}, "lm_head has the format 'F32'"),
        ({"formats": {"model.layers.9.mlp.up_proj": "Q8_0"}}, r"'model\.layers\.9\.mlp\.up_proj', expected"),
        ({"version": ...}, "version None, expected 1"),
        ({"version": 2}, "version 2, expected 1"),
        ({"activations": "int4"}, "activations"),
    ],
    ids=str,
)
def test_entries_that_say_nothing_known_are_refused(
    change: dict[str, Any], message: str, head: Any, tiny_hf: tuple[Any, Any], tmp_path: Path
) -> None:
    """``...`` stands for no such key."""
    saved(*tiny_hf, tmp_path)
    change_tensors(tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "config.json").read_text())
    entry = config["quantization_config"] | change
    config["quantization_config"] = {key: value for key, value in entry.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=message):
        head.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("layers.1.mlp.up_proj", "F32, expected U8"), ("norm", "U8, expected floats")]
)
def test_bytes_and_floats_do_not_stand_for_each_other(
    name: str, message: str, tiny_hf: tuple[Any, Any], tmp_path: Path
) -> None:
    """transformers would cast what has the right shape."""
    saved(*tiny_hf, tmp_path)
    key, other = f"model.{name}.weight", torch.uint8 if name == "norm" else torch.float32
    change_tensors(tmp_path, lambda tensors: tensors.update({key: tensors[key].to(other)}))
    for head in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(MissingTensorsError, match=rf"{name}\.weight is {message}"):
            head.from_pretrained(tmp_path)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "60KB"])
def test_formats_travel_with_the_tensors(shard: str, loaded: bool, tmp_path: Path) -> None:
    """Blocks of Q4_K and Q4_0 take as many bytes."""
    model = write_hf_directory(
        tmp_path / "dense", hidden_size=256, intermediate_size=256, num_attention_heads=8
    )
    rt.quantize_model(model, "Q4_K")
    model.config.quantization_config = rt.hf.RealizarConfig.from_model(model)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.save_pretrained(tmp_path, max_shard_size=shard)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["formats"]["model.layers.2.mlp.up_proj"] = "Q4_0"
    (tmp_path / "config.json").write_text(json.dumps(config))
    for head in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj.*found 'Q4_K', expected 'Q4_0'"):
            head.from_pretrained(tmp_path)
    # as a directory of an older version
    change_tensors(tmp_path, lambda tensors: None)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, {FORMATS_KEY: "[1]"})
    with pytest.raises(CheckpointError, match=r"metadata 'realizar_torch.formats': found '\[1\]'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_prepacked_models_generate_and_save_the_same(
    tiny_path: Path, tiny_hf: tuple[Any, Any], tmp_path: Path
) -> None:
    tied = write_tied(tmp_path / "tied.gguf")
    for source in (tiny_path, tied):
        model, tokenizer = rt.hf.from_gguf(source)
        prompt = tokenizer(TEXT, return_tensors="pt")
        expected = model.generate(**prompt, **GREEDY)
        model.save_pretrained(tmp_path / "plain")
        footprint = model.get_memory_footprint()
        rt.prepack(model, "planar")
        assert {m.layout for m in model.modules() if isinstance(m, PackedModule)} == {"planar"}
        assert model.get_memory_footprint() == footprint
        model.save_pretrained(tmp_path / "prepacked")
        assert content(tmp_path / "plain") == content(tmp_path / "prepacked")
        rt.unpack(model)
        assert torch.equal(model.generate(**prompt, **GREEDY), expected)


@pytest.mark.parametrize("surgery", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_prepacked_weights_are_tied_again(surgery: Any, tmp_path: Path) -> None:
    """transformers looks for a parameter, which a prepacked module has not."""
    model = surgery(rt.hf.from_gguf(write_tied(tmp_path / "tied.gguf"))[0])
    ids = torch.arange(9)[None]
    expected, footprint = model(ids).logits, model.get_memory_footprint()
    rt.prepack(model, "planar")
    model.tie_weights()
    # each entry of its own: two tensors now
    with pytest.warns(UserWarning, match="have as many bytes"):
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    assert model.get_memory_footprint() > footprint
    model.tie_weights()
    assert model.get_memory_footprint() == footprint
    assert {m.layout for m in model.modules() if isinstance(m, PackedModule)} == {"planar"}
    rt.unpack(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("missing", [None, 5])
def test_tying_leaves_layouts_and_what_is_not_tied(missing: Any, tmp_path: Path) -> None:
    """Where it fails, too: transformers looks names up in ``missing_keys``."""
    model = rt.hf.from_gguf(write_tied(tmp_path / "tied.gguf"))[0]
    rt.prepack(model, "planar")
    own = {name: value for name, value in model.named_buffers() if name.startswith("model.layers.")}
    with nullcontext() if missing is None else pytest.raises(TypeError):
        model.tie_weights(missing_keys=missing)
    assert {m.layout for m in model.modules() if isinstance(m, PackedModule)} == {"planar"}
    buffers = dict(model.named_buffers())
    assert own and all(buffers[name] is value for name, value in own.items())
    assert model.lm_head.packed is model.model.embed_tokens.packed
