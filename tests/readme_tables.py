"""The README's support tables from the code's own: ``python tests/readme_tables.py`` rewrites them."""

from pathlib import Path

from realizar_torch.formats import PACKED_FORMATS, PLAIN_FORMATS
from realizar_torch.models.arch import ARCHITECTURES, QUERY_KEY_VALUE, ArchSpec

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- tables: python tests/readme_tables.py -->", "<!-- end of tables -->"


def tables() -> str:
    lines = ["| format | bits per weight | weights per block |", "| --- | ---: | ---: |"]
    lines += [f"| {f.name} | {f.bits_per_weight:g} | {f.block_size} |" for f in PACKED_FORMATS]
    plain = ", ".join(f.name for f in PLAIN_FORMATS)
    lines += ["", f"Tensors stored as {plain} become ordinary float parameters."]
    lines += ["", "| architecture | conventions |", "| --- | --- |"]
    for arch in ARCHITECTURES.values():
        lines.append(f"| {arch.name} | {', '.join(_conventions(arch))} |")
    return "\n".join(lines)


def _conventions(arch: ArchSpec) -> list[str]:
    """The facts of a row, in words: norms and MLP, then what differs from a plain transformer."""
    norm = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[arch.normalization]
    norm += "" if arch.norm_bias else " without bias"
    pattern = arch.sliding_pattern
    sliding = f"in {pattern.count(True)} of {len(pattern)} layers" if len(pattern) > 1 else "where told"
    unrotated = f"{arch.rotary_pattern.count(False)} of {len(arch.rotary_pattern)} layers"
    qk_norm = {
        "head": "QK-norm",
        "each head": "QK-norm per head where stored",
        "whole": "QK-norm over all heads",
    }
    facts = {
        norm: arch.pre_norms,
        f"{norm} behind attention and MLP only": not arch.pre_norms,
        f"{'gated ' if arch.gated else ''}{arch.activation.replace('_', ' ')} MLP": True,
        "fused gate and up": arch.fused_gate_up,
        f"experts{'' if arch.experts == 'every file' else ' where told'}": arch.experts is not None,
        "a shared expert": arch.shared_expert,
        "post-norms": arch.post_norms and arch.pre_norms,
        qk_norm.get(str(arch.qk_norm), ""): arch.qk_norm is not None,
        "parallel residual": arch.parallel_residual,
        "biases": "mlp.up_proj" in arch.biases,
        "q, k, v biases": arch.biases == QUERY_KEY_VALUE,
        "interleaved RoPE": arch.interleaved_qk,
        "learned positions": arch.learned_positions,
        f"no RoPE in {unrotated}": any(arch.rotary_pattern) and not all(arch.rotary_pattern),
        f"sliding window {sliding}": bool(pattern),
        "soft caps": arch.attention_softcap > 0,
        "scaled embeddings": arch.scale_embedding,
        f"logit scale {arch.logit_scale}": arch.logit_scale is not None,
    }
    return [fact for fact, present in facts.items() if present]


def updated(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
