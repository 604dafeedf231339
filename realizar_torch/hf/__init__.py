"""GGUF files as transformers models: transformers' modelling code, generation and saving, packed weights.

Importing this also makes the quantization method "realizar" known to transformers, which loads directories
that such models were saved to.
"""

from realizar_torch.errors import BackendUnavailableError

OLDEST = (5, 16)

try:
    from transformers import __version__ as _found
except ImportError as error:
    raise BackendUnavailableError(
        f"realizar_torch.hf needs the package transformers, which cannot be imported ({error}); "
        "install it: pip install 'realizar-torch[hf]'"
    ) from error
if tuple(map(int, _found.split(".")[:2])) < OLDEST:
    raise BackendUnavailableError(
        f"transformers is version {_found}, realizar_torch.hf needs {'.'.join(map(str, OLDEST))} or newer; "
        "update it: pip install -U 'realizar-torch[hf]'"
    )

# only now: without transformers these would fail with an error of Python's
from realizar_torch.hf.forwards import share_inputs  # noqa: E402
from realizar_torch.hf.loading import from_gguf  # noqa: E402
from realizar_torch.hf.quantizer import RealizarConfig, RealizarHfQuantizer  # noqa: E402

__all__ = ["RealizarConfig", "RealizarHfQuantizer", "from_gguf", "share_inputs"]
