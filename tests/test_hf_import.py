"""rt.hf needs transformers of a certain age, says so, and makes its quantization method known."""

import subprocess
import sys

import pytest

import realizar_torch as rt

WITHOUT = """
import sys, types
{setup}
import realizar_torch as rt
try:
    rt.hf
except rt.BackendUnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("sys.modules['transformers'] = None", "pip install 'realizar-torch[hf]'"),
        (
            "old = sys.modules['transformers'] = types.ModuleType('transformers'); old.__version__ = '5.9.1'",
            "transformers is version 5.9.1, realizar_torch.hf needs 5.16 or newer",
        ),
    ],
)
def test_transformers_is_missing_or_old(setup: str, expected: str) -> None:
    script = WITHOUT.format(setup=setup)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert expected in done.stdout, done.stderr


def test_importing_it_registers_the_method() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    assert AUTO_QUANTIZATION_CONFIG_MAPPING["realizar"] is rt.hf.RealizarConfig
    assert AUTO_QUANTIZER_MAPPING["realizar"] is rt.hf.RealizarHfQuantizer
