"""The README's support tables from the code's own: ``python tests/readme_tables.py`` rewrites them."""

from pathlib import Path

from realizar_torch.formats import PACKED_FORMATS, PLAIN_FORMATS
from realizar_torch.models.arch import ARCHITECTURES

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- tables: python tests/readme_tables.py -->", "<!-- end of tables -->"


def tables() -> str:
    lines = ["| format | bits per weight | weights per block |", "| --- | ---: | ---: |"]
    lines += [f"| {f.name} | {f.bits_per_weight:g} | {f.block_size} |" for f in PACKED_FORMATS]
    plain = ", ".join(f.name for f in PLAIN_FORMATS)
    lines += ["", f"Tensors stored as {plain} become ordinary float parameters."]
    lines += ["", "| architecture | conventions |", "| --- | --- |"]
    for arch in ARCHITECTURES.values():
        facts = [f"{arch.activation} MLP"]
        facts += ["QK-norm"] if arch.qk_norm else []
        facts += ["post-norms"] if arch.post_norms else []
        period = arch.sliding_period
        facts += [f"sliding window in all but every {period}th layer"] if period else []
        facts += ["un-permuted q and k rows"] if arch.interleaved_qk else []
        lines.append(f"| {arch.name} | {', '.join(facts)} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
