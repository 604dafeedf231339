"""doctor on models' headers: every kernel is compared and right; one that is broken is found and named."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import call, schema
from random_models import write_random_model

from realizar_torch import diagnosis
from realizar_torch.checkpoint.gguf import GGUFFile, open_gguf
from realizar_torch.diagnosis import step_check
from realizar_torch.diagnosis.parity import Matrix, Parity, random_blocks, share
from realizar_torch.diagnosis.shapes import Shapes, shapes_of
from realizar_torch.generation.prompt_rows import Piece
from realizar_torch.reference import dequantize

FILTERS = ("temperature", "top_k", "top_p", "min_p", "penalty", "all")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "m.gguf"
    return write_random_model(path, "gemma3", fmt="Q5_0")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    return partial(call, capsys)


def wrong(checks) -> set[tuple[str, str]]:
    return {(check.kernel, check.fmt) for check in checks if not check.ok}


def test_a_models_header_is_enough(run, model, monkeypatch):
    monkeypatch.setattr(GGUFFile, "read", lambda self, name: pytest.fail(f"{name} was read"))
    code, out, err = run("doctor", "-m", model, "--json")
    record = json.loads(out)
    assert code == 0 and record["ok"] and "first run" in err
    assert record["facts"]["model"] == str(model)
    assert schema(record["parity"]) == [
        {
            "device": "str",
            "kernel": "str",
            "fmt": "str",
            "shape": "str",
            "batch": "int",
            "error": "float",
            "ok": "bool",
        }
    ]
    of_cpu = [check for check in record["parity"] if check["device"] == "cpu"]
    kernels = {check["kernel"] for check in of_cpu}
    assert kernels >= {f"{op} {kind}" for op in ("linear", "norm_linear") for kind in ("float", "int8")}
    assert kernels >= {
        "dequantize",
        "embedding",
        "prompt and decode step float",
        "prompt and decode step int8",
    }
    batches = {check["batch"] for check in of_cpu if check["kernel"] == "linear int8"}
    assert batches == {1, 2, 5, 16}
    # really computed: fp32 sums are not the float64 ones
    assert all(0 < check["error"] < 0.3 for check in of_cpu if check["kernel"].startswith("linear"))


def test_a_missing_model_is_the_only_thing_told(run, tmp_path):
    code, out, err = run("doctor", "-m", tmp_path / "none.gguf")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "none.gguf: path: found 'No such file" in err


def test_a_wrong_product_is_named(run, monkeypatch):
    right = diagnosis.op_checks.ops.linear

    def scaled(x, weight, fmt, *args, **options):
        result = right(x, weight, fmt, *args, **options)
        return result * 1.001 if fmt == "Q5_K" and len(x) > 1 else result

    monkeypatch.setattr(diagnosis.op_checks.ops, "linear", scaled)
    code, out, _ = run("doctor")
    assert code == 1
    lines = [line for line in out.splitlines() if "WRONG" in line]
    assert {tuple(line.split()[:4]) for line in lines[:-1]} == {
        ("cpu", "linear", kind, "Q5_K") for kind in ("float", "int8")
    }
    # one vector was right
    assert all(" 1: " in line and line.count("WRONG") == 3 for line in lines[:-1])


def test_a_wrong_step_is_found(model, monkeypatch):
    source, step = open_gguf(model), step_check.decode_step
    monkeypatch.setattr(step_check, "decode_step", lambda *args: step(*args) * 1.01)
    found = list(step_check.check_step(source, torch.device("cpu")))
    assert len(found) == 2
    assert ("prompt and decode step float", "Q5_0") in wrong(found)


def test_nan_is_wrong_and_bits_can_be_asked_for():
    values = torch.tensor([1.0, torch.nan])
    assert not Parity("cpu", "k", "", "", 1, share(values, torch.ones(2), 1.0)).ok
    assert share(torch.ones(2), torch.ones(2), 0) == 0
    assert share(torch.tensor([1 + 2e-7]), torch.ones(1), 0) > 1


@pytest.mark.parametrize("fmt", ["Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_random_weights_have_the_size_of_real_ones(fmt):
    weights = dequantize(random_blocks(fmt, 64, 4096), fmt, 4096)
    assert 0.7 < float(weights.square().mean().sqrt() * 4096**0.5) < 1.4
    assert abs(float(weights.mean())) < 0.1 / 64


def test_a_sample_has_as_many_rows_over_a_multiple_of_16():
    blocks, decoded = Matrix("Q4_0", 32003, 64).sample(torch.device("cpu"))
    assert len(blocks) % 16 == 32003 % 16 and 1000 < len(blocks) <= 1024
    assert torch.equal(decoded, dequantize(blocks, "Q4_0", 64).double())
    assert len(Matrix("Q4_0", 7, 64).sample(torch.device("cpu"))[0]) == 7


class TestTriton:
    """In the interpreter, or on the GPU there is."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache_dtypes = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)

    @pytest.fixture(autouse=True)
    def triton(self):
        pytest.importorskip("triton")

    def shapes(self, model: Path) -> Shapes:
        mixed = Matrix("Q4_K", 6, 256), Matrix("Q4_K", 3, 256), Matrix("Q6_K", 3, 256)
        return Shapes(
            matrices=(Matrix("Q6_K", 5, 256),),
            normed=(mixed[0],),
            projections=(mixed,),
            pairs=(Matrix("Q4_K", 3, 256),),
            config=shapes_of(open_gguf(model)).config,
        )

    def test_every_kernel_of_the_step_is_right(self, model):
        from realizar_torch.diagnosis.attention_checks import check_attention
        from realizar_torch.diagnosis.triton_checks import check_kernels

        shapes = self.shapes(model)
        attention = check_attention(shapes.config, self.device, [torch.float32, *self.cache_dtypes])
        checks = [*check_kernels(shapes, self.device), *attention]
        assert wrong(checks) == set()
        assert {check.batch for check in checks if check.kernel == "matvec int8"} == {1, 2, 5}
        assert {check.kernel for check in checks} == {
            "matvec float",
            "matvec int8",
            "matmul",
            "matmul_qkv",
            "matmul_gate_up",
            "normalize",
            "norm_quantize",
            "quantize_activations",
            "qkv int8",
            "gate_up float",
            "gate_up int8",
            "attention",
        }

    @pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are not patched")
    def test_a_wrong_constant_of_a_decoder_is_named(self, model, monkeypatch):
        from realizar_torch.diagnosis.triton_checks import check_kernels
        from realizar_torch.triton_kernels import row_sums

        right = row_sums.zero_point
        monkeypatch.setattr(row_sums, "zero_point", lambda fmt: right(fmt) - (fmt == "Q6_K"))
        found = wrong(check_kernels(Shapes((Matrix("Q6_K", 5, 256), Matrix("Q5_0", 3, 64))), self.device))
        assert found == {("matvec int8", "Q6_K")}

    def test_lost_norms_of_heads_are_found(self, model, monkeypatch):
        from realizar_torch.diagnosis import attention_checks

        config, right = shapes_of(open_gguf(model)).config, attention_checks.decode_attention

        def without_one(*args, k_norm, **options):
            return right(*args, k_norm=torch.ones_like(k_norm), **options)

        assert config.arch.qk_norm == "head"
        monkeypatch.setattr(attention_checks, "decode_attention", without_one)
        assert wrong([next(attention_checks.check_attention(config, self.device, [torch.float32]))])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are not patched")
    def test_a_wrong_rotation_is_found(self, model, monkeypatch):
        from realizar_torch.diagnosis import attention_checks

        config, right = shapes_of(open_gguf(model)).config, attention_checks.decode_attention

        def swapped(qkv, k, v, positions, cos, sin, **options):
            return right(qkv, k, v, positions, sin, cos, **options)

        monkeypatch.setattr(attention_checks, "decode_attention", swapped)
        assert wrong([next(attention_checks.check_attention(config, self.device, [torch.float32]))]) == {
            ("attention", "float32")
        }

    def small(self, model, monkeypatch):
        """The model's facts, with fewer heads and tokens for the interpreter."""
        from realizar_torch.diagnosis import choice_checks, prompt_checks

        config = shapes_of(open_gguf(model)).config
        if self.device.type == "cpu":
            config = replace(config, num_heads=2, num_kv_heads=1, num_layers=1)
            monkeypatch.setattr(prompt_checks, "_PIECES", (Piece(1, 40, 3, 7), Piece(0, 0, 5)))
            monkeypatch.setattr(choice_checks, "_ROWS", 4)
        return config

    def test_every_kernel_of_prompts_and_choices_is_right(self, model, monkeypatch):
        from realizar_torch.diagnosis.choice_checks import check_choices
        from realizar_torch.diagnosis.prompt_checks import check_prompts

        config = self.small(model, monkeypatch)
        checks = list(check_prompts(config, self.device, [torch.float32, *self.cache_dtypes]))
        checks += check_choices(300, self.device)
        assert wrong(checks) == set()
        names = ["float32", *(str(dtype).removeprefix("torch.") for dtype in self.cache_dtypes)]
        assert {(check.kernel, check.fmt) for check in checks} == {
            *((kernel, name) for kernel in ("place_heads", "prompt_attention") for name in names),
            *((f"sample_rows {name}", "") for name in FILTERS),
            *((kernel, "") for kernel in ("norm_heads", "take_highest")),
        }

    @pytest.mark.parametrize("dtype", cache_dtypes)
    def test_a_cache_that_is_read_wrong_is_found(self, model, monkeypatch, dtype):
        """By a fiftieth of the scales of 8 bits, or a tenth of what attention gives."""
        from realizar_torch.diagnosis import attention_checks, prompt_checks

        config = self.small(model, monkeypatch)
        decode, prompt = attention_checks.decode_attention, prompt_checks.prompt_attention

        def scaled(run, *args, **options):
            if "v_scales" in options:
                options["v_scales"] = options["v_scales"] * 1.02
                return run(*args, **options)
            return run(*args, **options) * 1.1

        def decoded(*args, **options):
            out, int8 = decode(*args, **options | {"quantize": False})
            return out * 1.1, int8

        monkeypatch.setattr(attention_checks, "decode_attention", decoded)
        monkeypatch.setattr(prompt_checks, "prompt_attention", partial(scaled, prompt))
        found = wrong(attention_checks.check_attention(config, self.device, [dtype]))
        found |= wrong(prompt_checks.check_prompts(config, self.device, [dtype]))
        name = str(dtype).removeprefix("torch.")
        assert found == {("attention", name), ("prompt_attention", name)}

    def test_heads_that_are_placed_or_normed_wrong_are_found(self, model, monkeypatch):
        from realizar_torch.diagnosis import prompt_checks

        config = self.small(model, monkeypatch)
        place, norm = prompt_checks.place_heads, prompt_checks.norm_heads

        def late(qkv, places, *others, **options):
            place(qkv, places + torch.tensor([0, 1], device=places.device).int(), *others, **options)

        monkeypatch.setattr(prompt_checks, "place_heads", late)
        monkeypatch.setattr(
            prompt_checks,
            "norm_heads",
            lambda rows, first, *rest, **kind: norm(rows, first - 1, *rest, **kind),
        )
        found = wrong(prompt_checks.check_prompts(config, self.device, [torch.float32]))
        assert found >= {("place_heads", "float32"), ("norm_heads", "")}

    def test_another_choice_is_found(self, model, monkeypatch):
        """The number of another step, a filter that is left out, the second highest logit."""
        from realizar_torch.diagnosis import choice_checks

        self.small(model, monkeypatch)
        draw, highest = choice_checks.sample_rows, choice_checks.take_highest

        def next_step(logits, seen, floats, integers, *others):
            integers[:, 2] += 1
            draw(logits, seen, floats, integers, *others)

        def second(logits, *others):
            highest(logits.scatter(1, logits.argmax(-1, keepdim=True), -100.0), *others)

        monkeypatch.setattr(choice_checks, "sample_rows", next_step)
        monkeypatch.setattr(choice_checks, "take_highest", second)
        found = wrong(choice_checks.check_choices(300, self.device))
        assert found == {
            ("take_highest", ""),
            *((f"sample_rows {name}", "") for name in FILTERS),
        }
