"""Modules of a mixture of experts: state, layouts, saving, quantization, derivatives, compiling, decoding."""

import copy
import json

import pytest
import torch
from arch_fixtures import FIXTURES, TOLERANCE, golden, load, write_resized
from cases import assert_within
from command_line import call
from expert_oracle import mixture_oracle
from fixture_models import MODELS, has_experts

import realizar_torch as rt
from realizar_torch import ops
from realizar_torch.errors import FormatError, UnsupportedArchitectureError
from realizar_torch.generation.fusable import obstacle
from realizar_torch.generation.gpu_step import GpuStep
from realizar_torch.generation.workspace import MAX_BATCH, Workspace
from realizar_torch.models.loading import load_transformer
from realizar_torch.models.sources import open_source
from realizar_torch.nn.experts import DenseExperts, MixtureOfExperts, QuantizedExperts, Scores
from realizar_torch.nn.kv_cache import KVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = [name for name in MODELS if has_experts(name)]


def mixtures(model: torch.nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def with_dense_experts(model):
    """Packed experts become dense ones of the same values, in place."""
    for layer in mixtures(model):
        for part, experts in list(layer.experts.named_children()):
            setattr(layer.experts, part, DenseExperts(experts.dequantize()))
    return model


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory):
    """A qwen2moe of Q8_0, all rows whole blocks."""
    return write_resized(tmp_path_factory.mktemp("packed"), "qwen2moe", "Q8_0")[0]


def load_packed(path, **options):
    return load_transformer(
        open_source(path), device=torch.device("cpu"), dtype=torch.float32, activations="float", **options
    )


def test_modules_and_their_state(packed_file):
    """Copies, dtypes, layouts and state dicts of a model with packed experts."""
    model, ids = load_packed(packed_file), golden("qwen2moe")[0]
    with torch.inference_mode():
        expected = model(ids).logits
    layer = model.layers[0].mlp
    assert [type(part) for part in layer.experts.children()] == [QuantizedExperts] * 3
    assert layer.experts.gate_proj.weight.shape == (5, 96, 102)
    assert layer.router.weight.dtype == torch.float32 and type(layer.router) is Scores
    state = model.state_dict()
    assert state._metadata["layers.0.mlp.experts.up_proj"]["fmt"] == "Q8_0"

    placed = copy.deepcopy(model)
    rt.prepack(placed, "planar")
    assert placed.layers[0].mlp.experts.gate_proj.layout == "planar"
    assert "weight" not in dict(placed.layers[0].mlp.experts.gate_proj.named_parameters())
    for name, tensor in placed.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    placed.load_state_dict(state)
    rt.unpack(placed)
    half, dense = copy.deepcopy(model).bfloat16(), with_dense_experts(copy.deepcopy(model)).bfloat16()
    assert half.layers[0].mlp.experts.gate_proj.weight.dtype == torch.uint8
    with torch.inference_mode():
        assert torch.equal(placed(ids).logits, expected)
        rounding = (dense(ids).logits - expected).square().mean().sqrt()
        assert (half(ids).logits - expected).square().mean().sqrt() <= 1.2 * rounding < 2**-6 * expected.std()

    wrong = dict(state) | {"layers.0.mlp.experts.up_proj.weight": torch.zeros(5, 96, 102)}
    with pytest.raises(FormatError, match=r"torch.float32, expected torch.uint8 bytes of Q8_0"):
        model.load_state_dict(wrong)


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("numerics", ["float", "int8", "bfloat16"])
def test_a_mixture_is_the_sum_of_its_experts(packed_file, rows, numerics):
    """Against float64 of the decoded weights: a row takes the launch for few choices, fifty are grouped."""
    mixture, x = load_packed(packed_file).layers[0].mlp, torch.randn(rows, 96, generator=seeded(rows))
    if numerics == "bfloat16":
        mixture, x = mixture.bfloat16(), x.bfloat16()
    elif numerics == "int8":
        set_int8(mixture)
    with torch.inference_mode():
        assert_within(mixture(x), *mixture_oracle(mixture, x))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def set_int8(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "activations"):
            module.activations = "int8"


def test_decoded_experts_are_the_dense_ones(packed_file):
    part = load_packed(packed_file).layers[0].mlp.experts.up_proj
    x, experts = torch.randn(3, 1, 96), torch.tensor([[0, 4], [2, 1], [3, 3]])
    dense = DenseExperts(part.dequantize())
    assert dense.weight.shape == (5, 96, 96)
    expected = torch.einsum("tunk,tk->tun", dense.weight[experts], x[:, 0])
    assert torch.allclose(part(x, experts), expected, atol=1e-5)
    assert torch.allclose(dense(x, experts), expected, atol=1e-5)
    many, places = x.repeat(40, 1, 1), experts.repeat(40, 1)
    assert torch.allclose(dense(many, places), expected.repeat(40, 1, 1), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_quantized(name, tmp_path, capsys):
    """The verb quantize, rt.save and rt.load: the same bytes, and the values of the packed weights."""
    dense = write_resized(tmp_path, name, "Q8_0")[1]
    code, out, _ = call(capsys, "quantize", dense, tmp_path / "q", "--format", "Q4_0", "--json")
    record = json.loads(out)
    formats = {tensor["name"]: (tensor["format"], tensor["shape"]) for tensor in record["tensors"]}
    assert code == 0 and formats["blk.0.ffn_up_exps.weight"][0] == "Q4_0"
    assert len(formats["blk.0.ffn_up_exps.weight"][1]) == 3
    assert formats["blk.0.ffn_gate_inp.weight"][0] == "F32"
    saved = load_packed(tmp_path / "q")
    rt_options = {"activations": "float", "quantize": "Q4_0", "tokenizer": FIXTURES / f"{name}.gguf"}
    direct, _ = rt.load(dense, **rt_options)
    ids = golden(name)[0]
    with torch.inference_mode():
        logits = direct(ids).logits
        assert torch.equal(saved(ids).logits, logits)
        rt.save(direct, tmp_path / "again")
        assert torch.equal(load_packed(tmp_path / "again")(ids).logits, logits)
        assert (with_dense_experts(direct)(ids).logits - logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("rows", [2, 70])
def test_dense_experts_under_autocast(rows):
    dense, x = DenseExperts(torch.randn(5, 8, 12)), torch.randn(rows, 1, 12)
    experts = torch.randint(0, 5, (rows, 2))
    with torch.autocast("cpu", torch.bfloat16):
        y = dense(x, experts)
    expected = torch.einsum("tunk,tk->tun", dense.weight[experts], x[:, 0])
    # both factors rounded to 8 bits
    assert y.dtype == torch.float32 and (y - expected).abs().max() < 2**-6 * 12


def test_autocast_decides_on_no_route():
    """Scores that bfloat16 cannot tell apart."""
    router = Scores(torch.tensor([[1.0, 2**-12], [1.0, -(2**-12)]]))
    for sign in (1.0, -1.0):
        x = torch.tensor([[1.0, sign]])
        with torch.autocast("cpu", torch.bfloat16):
            scores, compiled = router(x), torch.compile(router, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(scores, router(x)) and torch.equal(compiled, scores)
        assert scores.dtype == torch.float32 and scores[0, 0] - scores[0, 1] == sign * 2**-11


def test_no_rows_and_no_experts(packed_file):
    part = load_packed(packed_file).layers[0].mlp.experts.up_proj
    x, experts = torch.zeros(2, 0, 1, 96), torch.zeros(2, 0, 3, dtype=torch.int64)
    for module in (part, DenseExperts(part.dequantize())):
        assert module(x, experts).shape == (2, 0, 3, part.out_features)
    with pytest.raises(FormatError, match=r"shape .0, 96, 102., expected .experts, rows, row_bytes"):
        QuantizedExperts(part.weight[:0], 96, "Q8_0")


def test_quantize_model_packs_dense_experts():
    """As quantize= would have; the router stays as it is."""
    model = load("mixtral")
    before = copy.deepcopy(model)
    report = rt.quantize_model(
        model, "Q8_0", exclude=("lm_head", "embed_tokens", "*_attn.*", "*.1.*.down_proj")
    )
    packed = [entry.names[0] for entry in report.modules if entry.fmt]
    assert packed == [
        *(f"layers.0.mlp.experts.{part}_proj" for part in ("gate", "up", "down")),
        *(f"layers.1.mlp.experts.{part}_proj" for part in ("gate", "up")),
    ]
    experts = model.layers[0].mlp.experts
    assert type(experts.up_proj) is QuantizedExperts and type(model.layers[0].mlp.router) is Scores
    dense = before.layers[0].mlp.experts.up_proj.weight
    expected = rt.dequantize(rt.quantize(dense[3], "Q8_0"), "Q8_0", 36)
    assert torch.equal(experts.up_proj.dequantize()[3], expected)
    for module, twin in zip(mixtures(model), mixtures(before), strict=True):
        for part, weights in module.experts.named_children():
            if isinstance(weights, QuantizedExperts):
                setattr(twin.experts, part, DenseExperts(weights.dequantize()))
    ids = golden("mixtral")[0]
    with torch.inference_mode():
        assert (model(ids).logits - before(ids).logits).abs().max() <= TOLERANCE


def test_experts_are_compiled_without_a_break(packed_file):
    layer = load_packed(packed_file).layers[0].mlp
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for count in (1, 50):
        x = torch.randn(count, 96)
        with torch.no_grad():
            assert torch.allclose(compiled(x), layer(x), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_models_of_them_are_refused_by_name(name):
    with pytest.raises(UnsupportedArchitectureError, match=r"expert_count = 5 has no|'qwen.moe' has no"):
        rt.hf.from_gguf(FIXTURES / f"{name}.gguf")


def test_gradients_pass_through_experts(packed_file):
    """A trainable input of the mixture: as through the dense one of its values."""
    layer = load_packed(packed_file).layers[0].mlp
    dense = with_dense_experts(copy.deepcopy(layer))
    for count in (2, 50):
        grads = []
        for module in (layer, dense):
            x = torch.randn(count, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
            module(x).square().sum().backward()
            grads.append(x.grad)
        assert grads[0].abs().max() > 0.1
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-4 * float(grads[1].abs().max()))


def test_generation_with_int8_activations(packed_file):
    """Greedy decoding step by step gives what whole prompts give, alone and in a batch."""
    model, _ = rt.load(packed_file, tokenizer=FIXTURES / "qwen2moe.gguf")
    ids = golden("qwen2moe")[0][:, :20]
    batch = torch.cat((ids, ids.roll(3)))
    new = model.generate(batch, max_new_tokens=6, eos_token_id=[])
    for row in range(2):
        alone = model.generate(batch[row : row + 1], max_new_tokens=6, eos_token_id=[])
        for step in range(20, 26):
            with torch.inference_mode():
                logits = model(new[row : row + 1, :step]).logits[0, -1]
            best = logits.topk(2).values
            if best[0] - best[1] < 0.05 * logits.std():
                break
            assert new[row, step] == alone[0, step] == logits.argmax()


@pytest.mark.parametrize("activations", [pytest.param("float", marks=pytest.mark.gpu), "int8"])
def test_the_gpu_step_runs_mixtures(packed_file, activations):
    """Interpreted where there is no GPU: the kernels around them, the mixtures by their modules.

    One token after the same cached ones. int8: a sum rounded otherwise may move a quant by a step, which is
    less than a third of what rounding all of them does (see test_cpu_step.py).
    """
    pytest.importorskip("triton")
    model, ids = load_packed(packed_file).to(DEVICE), golden("qwen2moe")[0][:, :6].to(DEVICE)
    assert obstacle(model, experts=True) is None
    assert obstacle(model) == "layers.0.mlp is a MixtureOfExperts"
    with torch.inference_mode():
        cache = KVCache(model.config, 1, 32, device=DEVICE)
        model(ids[:, :-1], cache=cache)
        exact = model(ids[:, -1:], cache=copy.deepcopy(cache)).logits[:, -1]
        if activations == "int8":
            set_int8(model)
        modules = model(ids[:, -1:], cache=copy.deepcopy(cache)).logits[:, -1]
        step = GpuStep(model, cache, Workspace.for_model(model.config, 1, device=DEVICE))
        logits = step.run(ids[:, -1])
    if activations == "float":
        assert (logits - exact).abs().max() <= TOLERANCE
    else:
        rounding = (modules - exact).square().mean().sqrt()
        assert (logits - modules).square().mean().sqrt() <= 0.3 * rounding < 0.04 * exact.std()


def test_a_step_of_every_batch_waits_for_nobody():
    """Rows that a GPU is given at once are as many as a decode step can have."""
    assert MAX_BATCH <= ops.STEP_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9])
def test_generation_in_a_graph(packed_file, batch):
    model, _ = rt.load(packed_file, tokenizer=FIXTURES / "qwen2moe.gguf", batch_size=batch)
    ids = golden("qwen2moe")[0][:, :20].repeat(batch, 1).cuda()
    options = {"max_new_tokens": 12, "eos_token_id": []}
    graph = model.generate(ids, cuda_graph=True, **options)
    assert torch.equal(graph, model.generate(ids, cuda_graph=False, **options))
    # up to eight rows are one launch of every matvec
    assert torch.equal(graph[:8], graph[:1].expand_as(graph[:8]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_a_decode_step_does_not_wait_for_the_gpu(packed_file, rows):
    for path in (packed_file, packed_file.with_name("qwen2moe-dense.gguf")):
        layer = load_packed(path).layers[0].mlp
        x = torch.randn(rows, 96, generator=seeded(rows))
        with torch.inference_mode():
            (expected, tolerance), moved = mixture_oracle(layer, x), x[:, None].cuda()
            # compiled outside
            layer.cuda()(moved)
            torch.cuda.set_sync_debug_mode("error")
            try:
                y = layer(moved)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert_within(y[:, 0].cpu(), expected, tolerance)
