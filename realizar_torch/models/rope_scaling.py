"""How a file stretches rotary embedding beyond the length that its model was first trained for."""

import math
from dataclasses import dataclass

from realizar_torch.errors import UnsupportedArchitectureError
from realizar_torch.models.metadata import Keys


@dataclass(frozen=True)
class RopeScaling:
    """What happens to the frequencies theta^(-2i/d) and to cos and sin.

    ``factor``: linear scaling, every frequency is divided by it. ``yarn``: YaRN's factor, which divides the
    slow frequencies only. ``magnitude`` multiplies cos and sin. ``original_length``: positions of the first
    training, those of the context where the file names none; a model that shall see more uses the long one of
    the two sets of factors of LongRoPE.
    """

    factor: float = 1.0
    yarn: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    original_length: int = 0

    def divisors(self, rotary_dim: int, theta: float) -> tuple[float, ...] | None:
        """Divisor of each frequency (rotary_dim/2 numbers), or None where all are 1.

        YaRN (Peng et al. 2023, "NTK-by-parts"): frequencies that turn more than ``beta_fast`` times within
        the original length stay, those of less than ``beta_slow`` turns are divided by the factor, with a
        linear ramp between the two over the dimensions.
        """
        if self.yarn == 1.0:
            return None if self.factor == 1.0 else (self.factor,) * (rotary_dim // 2)

        def dimension(turns: float) -> float:
            length = self.original_length / (turns * 2 * math.pi)
            return rotary_dim * math.log(length) / (2 * math.log(theta))

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), rotary_dim - 1)
        # as in transformers: no division by zero
        width = high - low if high != low else 0.001
        ramps = (min(max((i - low) / width, 0.0), 1.0) for i in range(rotary_dim // 2))
        return tuple(1.0 / (ramp / self.yarn + (1.0 - ramp)) for ramp in ramps)


def read_rope_scaling(keys: Keys, theta: float) -> RopeScaling:
    """Reads the keys ``rope.scaling.*``, ``theta`` being RoPE's base; a factor without a type is linear, as
    in llama.cpp.

    Keys.wrong for impossible numbers, UnsupportedArchitectureError for a type that is not implemented.
    """
    factor = keys.optional("rope.scaling.factor", float, 0) or keys.optional("rope.scale_linear", float, 0)
    kind = keys.optional("rope.scaling.type", str, "linear")
    magnitude = keys.positive("rope.scaling.attn_factor", default=1.0, kind=float)
    original = keys.optional("rope.scaling.original_context_length", int, 0)
    if original == 0:
        original = keys.positive("context_length")
    if kind in ("none", "longrope") or (kind == "linear" and factor == 0):
        return RopeScaling(magnitude=magnitude, original_length=original)
    if kind not in ("linear", "yarn"):
        raise UnsupportedArchitectureError(
            f"{keys.source}: RoPE scaling {kind!r} is not supported; "
            "supported: none, linear, yarn, longrope, rope_freqs"
        )
    if not (factor > 0 and math.isfinite(factor)):
        sentence = f"the RoPE scaling factor is {factor}, expected a positive number"
        raise keys.wrong(sentence, "rope.scaling.factor", "rope.scale_linear", "rope.scaling.type")
    if kind == "linear":
        return RopeScaling(factor=float(factor), magnitude=magnitude, original_length=original)
    if theta <= 1.0:
        raise keys.wrong(f"YaRN needs a RoPE base above 1, found {theta}", "rope.freq_base")
    multiplier = keys.optional("rope.scaling.yarn_log_multiplier", float, 0)
    own = _yarn_magnitude(factor, 1.0) / _yarn_magnitude(factor, multiplier)
    scaling = RopeScaling(
        yarn=float(factor),
        beta_fast=keys.positive("rope.scaling.yarn_beta_fast", default=32.0, kind=float),
        beta_slow=keys.positive("rope.scaling.yarn_beta_slow", default=1.0, kind=float),
        # as in llama.cpp, which multiplies the factor of any scaling by it
        magnitude=magnitude * keys.positive("rope.scaling.yarn_attn_factor", default=own, kind=float),
        original_length=keys.positive("rope.scaling.original_context_length"),
    )
    try:
        scaling.divisors(2, theta)
    except (ArithmeticError, ValueError):
        names = ("factor", "yarn_beta_fast", "yarn_beta_slow", "original_context_length")
        sentence = f"YaRN's ramp from {scaling.beta_fast} to {scaling.beta_slow} turns cannot be computed"
        raise keys.wrong(sentence, *(f"rope.scaling.{name}" for name in names)) from None
    return scaling


def _yarn_magnitude(factor: float, multiplier: float) -> float:
    """Compensates that scores grow flatter when positions move together (YaRN, section 3.4)."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0
