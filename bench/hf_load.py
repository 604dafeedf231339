"""Seconds and memory from a GGUF file to a transformers model: rt.hf.from_gguf and transformers' own loader.

    python bench/hf_load.py --model FILE.gguf [FILE.gguf ...] [--runs 3] [--out FILE]

Each run is a fresh process with transformers, both model classes and this package imported before the clock
starts. Resident is what the process has grown by once every weight has been read; weights are the bytes of
parameters and buffers. transformers' path runs once: it decodes the whole file to float32.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, LlamaForCausalLM
from transformers.integrations import gguf
import realizar_torch as rt
rt.hf
transformers.logging.disable_progress_bar()

def resident():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

who, folder, name = sys.argv[1:]
before, started = resident(), time.perf_counter()
if who == "realizar_torch":
    model, tokenizer = rt.hf.from_gguf(folder + "/" + name)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
seconds = time.perf_counter() - started
for parameter in model.parameters():
    parameter.max()
record = {"seconds": seconds, "resident": resident() - before, "weights": model.get_memory_footprint()}
ids = torch.tensor([tokenizer("The capital of France is").input_ids])
record["next"] = tokenizer.decode(model(ids, logits_to_keep=1).logits[0, -1].argmax())
print(json.dumps(record))
"""


def measure(who: str, path: Path) -> dict:
    """One fresh process."""
    command = [sys.executable, "-c", CHILD, who, str(path.parent), path.name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{who} failed on {path.name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"who": who, "file": path.name}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", required=True, type=Path, help="GGUF files")
    parser.add_argument("--runs", type=int, default=3, help="of rt.hf.from_gguf; the best counts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    records = []
    print(f"{'file':34} {'':16} {'seconds':>8} {'weights/file':>13} {'resident/file':>14}  next token")
    for path in options.model:
        ours = min((measure("realizar_torch", path) for _ in range(options.runs)), key=lambda r: r["seconds"])
        size = path.stat().st_size
        for record in (ours, measure("transformers", path)):
            records.append(record | {"file_bytes": size})
            shares = [record[part] / size for part in ("weights", "resident")]
            print(
                f"{path.name:34} {record['who']:16} {record['seconds']:8.2f} {shares[0]:13.2f} "
                f"{shares[1]:14.2f}  {record['next']!r}",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
