"""Sizes and conventions of a mixture of experts, read from GGUF metadata and checked."""

from dataclasses import dataclass

from realizar_torch.errors import UnsupportedArchitectureError
from realizar_torch.models.arch import ArchSpec
from realizar_torch.models.metadata import Keys

# llama.cpp's numbers for "none told" and for the softmax over all experts (llama-hparams.h)
_SOFTMAX = (0, 1)


@dataclass(frozen=True)
class Experts:
    """``count`` experts of ``inner_size``, of which each token uses ``used``.

    shared_size: inner size of the expert that every token uses, 0 where there is none. normalized: weights of
    the used experts are scaled to add up to 1.
    """

    count: int
    used: int
    inner_size: int
    shared_size: int
    normalized: bool


def read_experts(keys: Keys, arch: ArchSpec) -> Experts | None:
    """None for a model without experts. UnsupportedArchitectureError for another way to choose or weight
    them, or for experts in an architecture that has none here."""
    count = keys.optional("expert_count", int, 0)
    if arch.experts == "every file":
        count = keys.positive("expert_count")
    if not count:
        return None
    if count < 0:
        raise keys.wrong(f"expert_count is {count}, expected 0 or more", "expert_count")
    if arch.experts is None:
        raise UnsupportedArchitectureError(
            f"{keys.source}: {arch.name} with {count} experts is not supported"
        )
    _refuse_other_routes(keys)
    used = keys.positive("expert_used_count")
    if used > count:
        sentence = f"{used} experts are to be used of {count}"
        raise keys.wrong(sentence, "expert_used_count", "expert_count")
    inner = keys.positive("feed_forward_length")
    default = max(1, inner // used) if arch.split_experts else inner
    shared = keys.positive("expert_shared_feed_forward_length", default=inner) if arch.shared_expert else 0
    return Experts(
        count=count,
        used=used,
        inner_size=keys.positive("expert_feed_forward_length", default=default),
        shared_size=shared,
        normalized=keys.optional("expert_weights_norm", bool, arch.normalized_experts),
    )


def _refuse_other_routes(keys: Keys) -> None:
    for key, known, expected in (
        ("expert_gating_func", _SOFTMAX, "the softmax over all experts"),
        ("expert_group_count", (0, 1), "no groups of experts"),
    ):
        if (value := keys.optional(key, int, 0)) not in known:
            raise UnsupportedArchitectureError(
                f"{keys.source}: {key} = {value} is not supported, only {expected}"
            )
    if (scale := keys.factor("expert_weights_scale")) != 1.0:
        raise UnsupportedArchitectureError(f"{keys.source}: expert_weights_scale = {scale} is not supported")
