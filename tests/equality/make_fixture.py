"""Make the fixture of `test_earlier_version.py`: files that an earlier version wrote and every later one must read.

    python tests/equality/make_fixture.py TREE tests/fixtures/COMMIT

TREE is a checkout of that version. The folder gets `files.tar.gz` and `expected.json`. The archive holds `text.jsonl`
(TREE's operations manual, a document a paragraph), `tokens/` made of it, `runs/stopped/` (a run that was stopped at
half its length), `exports/MODEL/` of the six models, and `logits.safetensors`, what they predict after tokens 5 and 20
of `ids`. expected.json holds `ids`, the options of the run, the rows that the same run logs without a stop, and what
`eval.py` says of the stopped one. TREE writes all of it by its commands.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from compare_trees import MODELS, run

STEPS = 12
DATA = ("data=local", "data.tokenizer=train", "data.vocab_size=270", "data.heldout_fraction=0.1", "data.context=32")
MODEL = (
    "model.hidden_size=16", "model.num_heads=2", "model.head_dim=8", "model.num_hidden_layers=2",
    "model.intermediate_size=24", "model.state_size=8", "model.mamba_head_dim=8",
)  # fmt: skip
TRAIN = (
    *DATA, *MODEL, "train.batch_tokens=256", "train.micro_tokens=128", "train.device=cpu", "train.precision=fp32",
    "train.log_every=1", "train.validate_every=6", "train.save_every=null", "schedule.peak=0.01",
    "schedule.warmup_updates=4", "seed=42",
)  # fmt: skip
LOGITS = """
import json, sys
from pathlib import Path
import torch
import efla_lm
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    logits = {
        folder.name: AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits[:, [4, 19]].contiguous()
        for folder in sorted(Path(sys.argv[1]).iterdir())
    }
save_file(logits, "logits.safetensors")
"""


def split_text(manual: str, target: Path) -> None:
    """One paragraph of the manual a line, as JSON, so that each is a document."""
    paragraphs = [" ".join(part.split()) for part in manual.split("\n\n")]
    target.write_text("".join(json.dumps({"text": part}) + "\n" for part in paragraphs if part))


def make(tree: Path, folder: Path) -> dict[str, Any]:
    """Fill `folder` with the commands of `tree`, and return what expected.json holds."""
    split_text((tree / "docs" / "operations.md").read_text(), folder / "text.jsonl")
    tokens, runs = folder / "tokens", folder / "runs"
    places = (f"data.sources=[{folder / 'text.jsonl'}]", f"data.dir={tokens}")
    run(tree, folder, "-m", "scripts.prepare", *DATA, *places)
    straight = (str(tree / "train.py"), *TRAIN, *places, f"train.steps={STEPS}", f"runs_dir={runs}")
    run(tree, folder, *straight, "name=straight")
    run(tree, folder, *straight, "name=stopped", f"train.stop_at={STEPS // 2}")
    rows = [json.loads(line) for line in (runs / "straight" / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")

    evaluation = ("tasks=heldout", f"tasks.data_dir={tokens}", "device=cpu", f"out={folder / 'results'}")
    run(tree, folder, str(tree / "eval.py"), f"checkpoint={runs / 'stopped'}", *evaluation)
    (result,) = (folder / "results").glob("*.json")

    for model in MODELS:
        run(tree, folder, *straight, f"model={model}", f"name={model}", "train.steps=2")
        shutil.move(runs / model / "export", folder / "exports" / model)
    ids = torch.randint(3, 260, (2, 20), generator=torch.Generator().manual_seed(0)).tolist()
    run(tree, folder, "-c", LOGITS, str(folder / "exports"), json.dumps(ids))
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "options": [*TRAIN, f"train.steps={STEPS}"],
        "rows": [{name: row[name] for name in names if name in row} for row in rows],
        "heldout": json.loads(result.read_text())["results"]["heldout"],
        "ids": ids,
    }


def main(tree: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="efla-fixture-") as name:
        folder = Path(name)
        (folder / "exports").mkdir()
        expected = make(tree, folder)
        for path in (*folder.glob("runs/stopped/*.yaml"), *folder.glob("runs/stopped/*.jsonl")):
            text = path.read_text().replace(str(tree), "/efla-lm").replace(str(folder), "/efla")
            path.write_text(text.replace(f'"{platform.node()}"', '"host"'))
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out / "files.tar.gz", "w:gz") as archive:
            for part in ("text.jsonl", "tokens", "runs/stopped", "exports", "logits.safetensors"):
                archive.add(folder / part, part, filter=anonymous)
        (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
