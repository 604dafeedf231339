"""Model references: a path, or ``owner/name:QUANT`` on the Hugging Face Hub (through huggingface_hub)."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from realizar_torch.checkpoint.paths import given_path
from realizar_torch.errors import BackendUnavailableError, GGUFError

_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(:(?P<quant>[\w.-]+))?")
_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_NAMES_SHOWN = 20
# Seconds for one attempt to ask what a repository holds; the cache answers where that fails.
_TIMEOUT = 5.0


def find_model(reference: str | os.PathLike[str]) -> Path:
    """The local path that ``reference`` means, downloaded into the Hub's own cache if need be.

    Whatever exists as a path is that path, and so is anything that cannot be ``owner/name`` or
    ``owner/name:QUANT``; the GGUF reader tells if it is missing. QUANT is looked for in file names, whole
    and in any case ("Q4_K_M"); without it the repository must hold one model. Offline mode (HF_HUB_OFFLINE)
    and an unreachable Hub fall back to what is cached.

    Raises FormatError for what is neither; BackendUnavailableError without huggingface_hub or when the Hub
    cannot be reached and nothing is cached; GGUFError when the repository does not exist, or holds no such
    model or several.
    """
    path = given_path(reference)
    match = _REFERENCE.fullmatch(os.fspath(reference))
    if match is None or path.exists() or path.suffix == ".gguf":
        return path
    try:
        import huggingface_hub
    except ImportError:
        raise BackendUnavailableError(
            f"{reference!r} is no file here, and to look it up on the Hugging Face Hub install: "
            "pip install 'realizar-torch[hf]' (huggingface_hub); or name a GGUF file"
        ) from None
    repo, quant = match["repo"], match["quant"]
    names = _remote_names(huggingface_hub, repo)
    if names is None:
        return _cached_model(huggingface_hub, repo, quant)
    paths = [huggingface_hub.hf_hub_download(repo, name) for name in select_files(names, quant, repo)]
    return Path(paths[0])


def select_files(names: list[str], quant: str | None, repo: str) -> list[str]:
    """The file names of the one model among ``names`` that ``quant`` means: one file, or all shards in
    order."""
    models = group_shards(names)
    found = [model for model in models if quant is None or _mentions(model, quant)]
    if len(found) == 1:
        return models[found[0]]
    wanted = f"{quant} model" if quant else "model"
    listed = ", ".join(found or models) if len(models) <= _MAX_NAMES_SHOWN else f"{len(models)} models"
    if not models:
        raise GGUFError(f"{repo} holds no GGUF file; name a repository of GGUF files")
    raise GGUFError(
        f"{repo} holds {len(found) or 'no'} {wanted}{'s' if found else ''}, expected one; it has: {listed}. "
        f"Choose with {repo}:QUANT"
    )


def group_shards(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF file names by the model that they are (a part of), shards in order; projectors left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not Path(name).name.lower().startswith("mmproj"):
            models.setdefault(_SHARD_SUFFIX.sub("", name[: -len(".gguf")]), []).append(name)
    return models


def _mentions(model: str, quant: str) -> bool:
    # an underscore may stand before the name of a format, but behind it it is part of the name: Q4_K, Q4_K_M
    return re.search(rf"(^|[-._/]){re.escape(quant)}($|[-./])", model, re.IGNORECASE) is not None


def _remote_names(hub: ModuleType, repo: str) -> list[str] | None:
    """Names of the repository's files, or None where the Hub cannot be asked."""
    try:
        # one request; listing the tree would repeat a failed one for half a minute
        return [file.rfilename for file in hub.HfApi().model_info(repo, timeout=_TIMEOUT).siblings]
    except hub.errors.RepositoryNotFoundError:
        raise GGUFError(
            f"{repo} is neither a file here nor a repository on the Hugging Face Hub that may be read; check "
            "the name, or log in with `hf auth login` if it is private"
        ) from None
    except Exception:
        # offline mode, no network, a proxy: each HTTP client has its own exceptions, and the cache decides
        return None


def _cached_model(hub: ModuleType, repo: str, quant: str | None) -> Path:
    try:
        folder = Path(hub.snapshot_download(repo, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        raise BackendUnavailableError(
            f"{repo} is no file here, the Hugging Face Hub cannot be reached (or offline mode is on), and "
            "its cache does not hold it; name a GGUF file"
        ) from None
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    return folder / select_files(names, quant, f"the cached part of {repo}")[0]
