"""Wrong arguments of the ops: our error, naming found and expected; and what happens without Numba."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch
from cases import random_blocks

from realizar_torch import ops
from realizar_torch.errors import FormatError
from realizar_torch.formats import Q4_K
from realizar_torch.ops import portable

WEIGHT = random_blocks("Q4_K", 4, 300)
X = torch.ones(2, 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[:, 1:]}, r"input has shape \[2, 299\], expected last dimension 300"),
        ({"x": torch.ones(2, 556)}, r"\[2, 556\], expected last dimension 300"),
        ({"x": torch.tensor(1.0)}, r"input has shape \[\]"),
        ({"x": X.long()}, "input is torch.int64, expected one of torch.float16"),
        ({"x": X.bool()}, "input is torch.bool"),
        ({"x": X.to(torch.complex64)}, "input is torch.complex64"),
        ({"weight": WEIGHT.to(torch.float16)}, r"weight is torch.float16, expected torch.uint8 .*module.to"),
        ({"weight": WEIGHT.to(torch.int8)}, "weight is torch.int8, expected torch.uint8"),
        (
            {"weight": WEIGHT[0]},
            r"weight has shape \[288\], expected \[rows, 288\]: 300 weights are 2 Q4_K blocks",
        ),
        ({"weight": WEIGHT[:0]}, r"weight has shape \[0, 288\]"),
        ({"weight": WEIGHT[:, : Q4_K.block_bytes]}, r"expected \[rows, 288\]"),
        ({"fmt": "Q4_0"}, r"expected \[rows, 180\]: 300 weights are 10 Q4_0 blocks"),
        ({"fmt": "Q4_X"}, "unknown format 'Q4_X'"),
        ({"fmt": "F16"}, "F16 is a plain float format"),
        ({"in_features": 0}, "in_features is 0"),
        ({"bias": torch.ones(3)}, r"bias is torch.float32 \[3\], expected a float type and shape \[4\]"),
        ({"bias": torch.ones(1)}, r"bias is torch.float32 \[1\]"),
        ({"bias": torch.ones(4).long()}, "bias is torch.int64"),
        ({"activations": "int4"}, "activations is 'int4', expected one of 'float', 'int8'"),
        ({"layout": "tiled"}, "unknown layout 'tiled'; known: ggml, planar"),
        ({"layout": "planar"}, "layout 'planar' has no kernel on cpu, expected 'ggml'; .*unpack"),
        ({"x": X.to("meta")}, "x is on meta, weight is on cpu"),
        ({"weight": WEIGHT.to("meta")}, "x is on cpu, weight is on meta; .*has not been loaded yet"),
        ({"bias": torch.ones(4, device="meta")}, "x is on cpu, bias is on meta"),
    ],
)
def test_linear(change: dict, message: str) -> None:
    arguments = {"x": X, "weight": WEIGHT, "fmt": "Q4_K", "in_features": 300, **change}
    with pytest.raises(FormatError, match=message):
        ops.linear(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_weight": torch.ones(299)}, r"norm_weight is torch.float32 \[299\], .*\[300\]"),
        ({"norm_bias": torch.ones(1)}, "norm_bias is torch.float32"),
        (
            {"normalization": "batchnorm"},
            "normalization is 'batchnorm', expected one of 'layernorm', 'rmsnorm'",
        ),
        ({"fmt": None}, "dense weight is torch.uint8, expected a float type"),
        (
            {"fmt": None, "weight": torch.ones(4, 299)},
            r"dense weight has shape \[4, 299\], expected \[rows, 300\]",
        ),
        ({"fmt": None, "weight": torch.ones(4, 300), "activations": "int8"}, "needs a packed weight"),
        ({"bias": torch.ones(5)}, "bias is torch.float32"),
        ({"norm_weight": torch.ones(300, device="meta")}, "x is on cpu, norm_weight is on meta"),
    ],
)
def test_norm_linear(change: dict, message: str) -> None:
    arguments = {"x": X, "norm_weight": torch.ones(300), "norm_bias": None, "weight": WEIGHT, "fmt": "Q4_K"}
    arguments |= {"in_features": 300, "normalization": "layernorm", "eps": 1e-5, **change}
    with pytest.raises(FormatError, match=message):
        ops.norm_linear(**arguments)


@pytest.mark.parametrize(
    "ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.uint8)]
)
def test_embedding_takes_integer_ids(ids: torch.Tensor) -> None:
    with pytest.raises(FormatError, match=f"ids are {ids.dtype}, expected torch.int64 or torch.int32"):
        ops.embedding(ids, WEIGHT, "Q4_K", 300)


def test_output_dtype_must_be_a_float() -> None:
    with pytest.raises(FormatError, match=r"output dtype is torch\.int8"):
        ops.embedding(torch.tensor([1]), WEIGHT, "Q4_K", 300, dtype=torch.int8)
    with pytest.raises(FormatError, match=r"output dtype is torch\.int64"):
        ops.dequantize(WEIGHT, "Q4_K", 300, dtype=torch.int64)


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(2, 0), torch.ones(2, 32, dtype=torch.int32)])
def test_quantize_activations(x: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="input"):
        ops.quantize_activations(x, "Q8_0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": torch.zeros(2, 512)},
            r"q is torch.float32 \[2, 512\], expected torch.int8 and shape \[2, 512\]",
        ),
        ({"scale": torch.ones(2, 15)}, r"scale is torch.float32 \[2, 15\], expected .* shape \[2, 16\]"),
        ({"sums": torch.ones(1, 32)}, r"sums is torch.float32 \[1, 32\], .*ops.quantize_activations"),
        ({"in_features": 299}, "activations have 299 features, the weight has 300"),
        ({"scale": torch.ones(2, 16, device="meta")}, "x is on cpu, scale is on meta"),
    ],
)
def test_quantized_activations_that_somebody_built(change: dict, message: str) -> None:
    qx = dataclasses.replace(ops.quantize_activations(X, "Q4_K"), **change)
    with pytest.raises(FormatError, match=message):
        ops.linear(qx, WEIGHT, "Q4_K", 300)


def test_a_refused_call_leaves_the_ops_usable() -> None:
    with pytest.raises(FormatError):
        ops.linear(X[:, :5], WEIGHT, "Q4_K", 300)
    assert ops.linear(X, WEIGHT, "Q4_K", 300).isfinite().all()


def test_fakes_refuse_what_the_kernels_refuse() -> None:
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(FormatError, match="299"),
    ):
        ops.linear(torch.ones(2, 299), WEIGHT, "Q4_K", 300)


def test_without_numba_torch_ops_run_with_one_warning() -> None:
    script = """
        import sys, warnings
        sys.modules["numba"] = None
        import torch
        from cases import PROBES, probe_vector
        from realizar_torch import ops
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for fmt in ("Q6_K", "Q4_K"):
                x = probe_vector(256).unsqueeze(0)
                assert ops.linear(x, PROBES[fmt].rows(), fmt, 256).item() == PROBES[fmt].dot
            assert ops.linear(x, PROBES[fmt].rows(), fmt, 256, activations="int8").isfinite().all()
            assert ops.embedding(torch.tensor([0]), PROBES[fmt].rows(), fmt, 256).sum() == PROBES[fmt].total
        about_numba = [w for w in caught if "Numba" in str(w.message)]
        assert [w.filename for w in about_numba] == ["<string>"], about_numba
        print(about_numba[0].message)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "packed weights run in torch ops" in done.stdout


def test_a_device_without_kernels_is_named_once() -> None:
    portable._warn.cache_clear()
    one = portable._implementation(lambda kernels: torch.empty(1, device="meta"))
    several = portable._implementation(lambda kernels: (torch.empty(1, device="meta"),) * 3)
    with pytest.warns(UserWarning, match="no kernels for meta devices") as caught:
        assert len(several()) == 3
        assert one().is_meta
    assert [warning.filename for warning in caught] == [__file__]
