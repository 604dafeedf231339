"""transformers around packed weights: generate in every mode, pipelines, placement, compiling."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixture_models import PROMPT
from hf_reference import GREEDY, TEXT, reference_model

import realizar_torch as rt
from realizar_torch.checkpoint.gguf import open_gguf
from realizar_torch.hf.loading import load_model
from realizar_torch.nn.layout import PackedModule

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def dense(tiny_path: Path) -> Any:
    """The same model in fp32 whose best two logits are far apart on all that is generated here."""
    return reference_model(tiny_path)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 2},
        {"repetition_penalty": 1.3},
        {"use_cache": False},
    ],
    ids=str,
)
def test_generate_equals_the_dense_model(how: dict[str, Any], tiny_hf: tuple[Any, Any], dense: Any) -> None:
    model, tokenizer = tiny_hf
    prompt = tokenizer(TEXT, return_tensors="pt")
    expected = dense.generate(**prompt, **GREEDY, **how, pad_token_id=0, eos_token_id=[0, 2])
    assert torch.equal(model.generate(**prompt, **GREEDY, **how), expected)


def test_assisted_generation(tiny_path: Path, tiny_hf: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_hf
    prompt = tokenizer(TEXT, return_tensors="pt")
    assistant, _ = rt.hf.from_gguf(tiny_path)
    expected = model.generate(**prompt, **GREEDY)
    assert torch.equal(model.generate(**prompt, **GREEDY, assistant_model=assistant), expected)


def test_sampling_from_a_seed_equals_the_dense_model(tiny_hf: tuple[Any, Any], dense: Any) -> None:
    model, tokenizer = tiny_hf
    prompt = tokenizer(TEXT, return_tensors="pt")
    options = {
        "do_sample": True,
        "top_k": 20,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "eos_token_id": [0, 2],
    }
    results = []
    for each in (model, dense):
        transformers.set_seed(4)
        results.append(each.generate(**prompt, **options))
    assert torch.equal(*results)


def test_padded_batch_equals_single_prompts(tiny_hf: tuple[Any, Any]) -> None:
    """F-47"""
    model, tokenizer = tiny_hf
    texts = ["the", "the cat and", "other cats of the and the cat is the or"]
    together = model.generate(**tokenizer(texts, return_tensors="pt", padding=True), **GREEDY)
    for row, text in zip(together, texts, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **GREEDY)
        assert torch.equal(row[-12:], alone[0, -12:])


def test_a_streamer_gets_the_text(tiny_hf: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_hf
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = model.generate(**tokenizer(TEXT, return_tensors="pt"), **GREEDY, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, -12:])


def test_pipelines_complete_text_and_chats(tiny_hf: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_hf
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = pipe(TEXT, **GREEDY)[0]["generated_text"]
    ids = model.generate(**tokenizer(TEXT, return_tensors="pt"), **GREEDY)
    assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    chat = pipe([{"role": "user", "content": "the cat"}], **GREEDY)[0]["generated_text"]
    assert chat[-1]["role"] == "assistant" and chat[-1]["content"]


def test_generation_config_ends_where_the_file_ends(tiny_hf: tuple[Any, Any]) -> None:
    model, _ = tiny_hf
    settings = model.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, [0, 2], 0)
    assert not model.training and model.config.name_or_path is not None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(attention: str, tiny_path: Path, dense: Any) -> None:
    model, tokenizer = rt.hf.from_gguf(tiny_path, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        assert (model(ids).logits - dense(ids).logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_dtype_is_that_of_activations_and_norms(dtype: Any, tiny_path: Path, dense: Any) -> None:
    model, tokenizer = rt.hf.from_gguf(tiny_path, dtype=dtype)
    wanted = torch.bfloat16 if isinstance(dtype, str) else dtype
    floats = {value.dtype for value in model.parameters() if value.is_floating_point()}
    assert floats == {wanted} == {model.dtype}
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        logits, expected = model(ids).logits, dense(ids).logits
    assert logits.dtype == wanted
    # some 20 roundings to the dtype on the way, each of half a unit, add up like noise
    limit = 20**0.5 * torch.finfo(wanted).eps * float(expected.square().mean().sqrt())
    assert float((logits.float() - expected).square().mean().sqrt()) <= limit


def test_int8_activations(tiny_path: Path, dense: Any) -> None:
    model, tokenizer = rt.hf.from_gguf(tiny_path, activations="int8")
    assert {m.activations for m in model.modules() if isinstance(m, rt.QuantizedLinear)} == {"int8"}
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        found, expected = model(ids).logits, dense(ids).logits
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-4 < error <= 0.05


def test_footprint_is_the_bytes_of_the_file(tiny_path: Path, tiny_hf: tuple[Any, Any]) -> None:
    file = open_gguf(tiny_path)
    # everything that is not packed is float32 here
    expected = sum(
        info.nbytes if info.fmt.packed else 4 * torch.Size(info.shape).numel()
        for info in file.tensors.values()
    )
    buffers = sum(buffer.nbytes for buffer in tiny_hf[0].buffers())
    assert tiny_hf[0].get_memory_footprint() == expected + buffers


def test_weights_on_the_cpu_are_the_file(tiny_path: Path) -> None:
    """Nothing is copied but q and k, whose rows are put in order."""
    file = open_gguf(tiny_path)
    model = load_model(file, dtype=torch.float32)
    for name, module in (("blk.0.ffn_up", "mlp.up_proj"), ("blk.0.attn_v", "self_attn.v_proj")):
        weight = model.get_submodule(f"model.layers.0.{module}").weight
        assert weight.data_ptr() == file.read(f"{name}.weight").data_ptr()


def test_layers_on_several_devices(tiny_path: Path, tiny_hf: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny_hf
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    placed, _ = rt.hf.from_gguf(tiny_path, device_map=places, offload_folder=tmp_path)
    assert placed.hf_device_map == places
    assert placed.model.layers[1].mlp.up_proj.weight.is_meta
    prompt = tokenizer(TEXT, return_tensors="pt")
    assert torch.equal(placed.generate(**prompt, **GREEDY), model.generate(**prompt, **GREEDY))


def test_device_map_by_memory_counts_packed_bytes(tiny_path: Path, tmp_path: Path) -> None:
    size = tiny_path.stat().st_size
    places = []
    for memory in (2 * size, size):
        options = {"device_map": "auto", "max_memory": {"cpu": memory}, "offload_folder": tmp_path}
        model, _ = rt.hf.from_gguf(tiny_path, **options)
        places.append(set(getattr(model, "hf_device_map", {"": "cpu"}).values()))
    # in float32 the weights are four times the file, and a fourth of it is room for the largest layer
    assert places == [{"cpu"}, {"cpu", "disk"}]


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_compiles_without_a_graph_break(activations: str, tiny_path: Path) -> None:
    """With a static cache, and as one graph without any."""
    model, _ = rt.hf.from_gguf(tiny_path, activations=activations)
    ids = torch.arange(9)[None]
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    torch._dynamo.reset()
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        assert torch._dynamo.explain(model)(ids, past_key_values=cache).graph_break_count == 0
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert (compiled(ids, use_cache=False).logits - expected).abs().max() <= TOLERANCE


def test_the_quantizer_says_what_works(tiny_hf: tuple[Any, Any]) -> None:
    quantizer = tiny_hf[0].hf_quantizer
    assert quantizer.is_serializable() and quantizer.is_trainable and quantizer.is_compileable
    assert tiny_hf[0].is_quantized and tiny_hf[0].quantization_method == "realizar"


def test_a_file_without_packed_weights_is_an_ordinary_model() -> None:
    file = open_gguf(Path(__file__).parent / "fixtures" / "qwen3.gguf")
    model = load_model(file, dtype=torch.float32)
    assert not any(isinstance(module, PackedModule) for module in model.modules())
    assert getattr(model, "hf_quantizer", None) is None
    assert model(torch.arange(3, 3 + PROMPT)[None] % 99).logits.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_compiled_static_generation_on_a_gpu(activations: str, tiny_path: Path) -> None:
    """generate compiles by itself there; its tokens' logits are those of the model called as it is."""
    model, tokenizer = rt.hf.from_gguf(tiny_path, device_map="cuda", activations=activations)
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    rt.prepack(model)
    prompt = tokenizer(TEXT, return_tensors="pt").to("cuda")
    length = prompt.input_ids.shape[1]
    for _ in range(2):
        out = model.generate(
            **prompt,
            **GREEDY,
            cache_implementation="static",
            output_logits=True,
            return_dict_in_generate=True,
        )
        found = torch.cat(out.logits).float()
        with torch.inference_mode():
            expected = model(out.sequences[:, :-1]).logits[0, length - 1 :].float()
        # two evaluations in bfloat16, as in test_dtype_is_that_of_activations_and_norms
        limit = 40**0.5 * torch.finfo(torch.bfloat16).eps * (4 if activations == "int8" else 1)
        assert (found - expected).square().mean().sqrt() <= limit * expected.square().mean().sqrt()
        torch.cuda.synchronize()
    rt.unpack(model)
    model.cpu()
    with torch.inference_mode():
        assert model(prompt.input_ids.cpu()).logits.isfinite().all()
