"""Every exception this package raises on purpose: one base class, one name per kind of trouble."""


class RealizarError(Exception):
    """Base of all errors of this package. The message names what was found, what was expected and what to
    do."""


class FormatError(RealizarError, ValueError):
    """An argument of the wrong format, dtype, shape or value."""


class CheckpointError(RealizarError, ValueError):
    """A model directory or file that is damaged, malformed or contradicts itself."""


class GGUFError(CheckpointError):
    """A GGUF file that is truncated, malformed or contradicts itself."""


class UnsupportedArchitectureError(RealizarError, ValueError):
    """The file is sound, but its architecture (or one feature of it) is not implemented."""


class MissingTensorsError(RealizarError, ValueError):
    """A model file lacks tensors its architecture needs, or holds tensors nobody would read."""


class IncompleteShardsError(RealizarError, ValueError):
    """A split model of which some shard is missing or does not belong."""


class CacheFullError(RealizarError, ValueError):
    """The KV cache has fewer free positions than the request needs."""


class BackendUnavailableError(RealizarError, RuntimeError):
    """A device or an optional package that the request needs is not usable here."""
