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
    """Every fact of a row that differs from the default, in words."""
    norm = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[arch.normalization]
    facts = [norm if arch.pre_norms else f"{norm} behind attention and MLP only", f"{arch.activation} MLP"]
    facts += ["post-norms"] if arch.post_norms and arch.pre_norms else []
    facts += [{"head": "QK-norm", "whole": "QK-norm over all heads"}[arch.qk_norm]] if arch.qk_norm else []
    facts += ["un-permuted q and k rows"] if arch.interleaved_qk else []
    facts += ["q, k and v biases"] if arch.biases == QUERY_KEY_VALUE else []
    facts += ["fused gate and up"] if arch.fused_gate_up else []
    if not all(arch.rotary_pattern):
        facts.append(f"no RoPE in {arch.rotary_pattern.count(False)} of {len(arch.rotary_pattern)} layers")
    if arch.sliding_pattern:
        count, period = arch.sliding_pattern.count(True), len(arch.sliding_pattern)
        facts.append("sliding window" + (f" in {count} of {period} layers" if period > 1 else ""))
    facts += ["soft caps"] if arch.attention_softcap else []
    facts += ["scaled embeddings"] if arch.scale_embedding else []
    facts += [f"logit_scale {arch.logit_scale}"] if arch.logit_scale else []
    return facts


def updated(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
