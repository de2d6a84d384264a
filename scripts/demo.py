"""The main job, end to end, on the corpus inside CPython: prepare, train, validate, evaluate, continue a text.

Run as `make demo` or `python -m scripts.demo`. It types the commands that a user would type, shows each of them, and
ends with a summary. No hub, no account, no download; about three minutes on two CPU cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from efla_data.corpus.statistics import uniform_entropy, unigram_entropy
from efla_data.loader.token_file import TokenFile
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TOKENS = ROOT / "data" / "tokens" / "pydoc"
PROMPT = "The statement"
console = Console(highlight=False)


def new_run(root: Path) -> str:
    """A run name that no earlier demo has used, so that a second demo leaves the first as it is."""
    stem = time.strftime("demo-%Y%m%d-%H%M%S")
    name, n = stem, 1
    while (root / name).exists():
        n += 1
        name = f"{stem}-{n}"
    return name


def command(*arguments: str) -> float:
    """Run one command of the project as its user would; end the demo with its exit code if it fails. Seconds taken."""
    console.print(f"\n[bold cyan]$ python {' '.join(arguments)}[/]", soft_wrap=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the command has had Ctrl-C as well: training saves before it leaves
        process.wait()
        console.print("[red]error:[/] the demo was interrupted")
        sys.exit(130)
    if code != 0:
        console.print(f"[red]error:[/] the command above ended with exit code {code}")
        sys.exit(code)
    return time.monotonic() - start


def last_validation(run: Path) -> float:
    """The newest validation loss, nats per token, of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    if not losses:
        raise RuntimeError(f"{run / 'metrics.jsonl'} holds no val_loss: the run did not validate")
    return losses[-1]


def main() -> None:
    start = time.monotonic()
    run = ROOT / "runs" / new_run(ROOT / "runs")
    command("-m", "scripts.prepare", "data=pydoc")
    train_seconds = command("train.py", "experiment=demo", f"name={run.name}")
    if not (run / "export").is_dir():  # on SIGTERM training saves and ends with exit code 0
        console.print("[red]error:[/] training was stopped before its last update, so the demo ends here")
        sys.exit(1)
    command("eval.py", f"checkpoint={os.path.relpath(run, ROOT)}", "tasks=heldout")
    command("-m", "scripts.generate", f"checkpoint={os.path.relpath(run, ROOT)}", f'prompt="{PROMPT}"')

    train, heldout = TokenFile.open(TOKENS, "train"), TokenFile.open(TOKENS, "heldout")
    results = sorted((run / "results").glob("*.json"))
    table = Table(title="the demo in numbers", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path is never cut short
    table.add_row("tokens to train on, held out", f"{train.num_tokens:,}, {heldout.num_tokens:,}")
    table.add_row("held-out loss if every token were equally likely", f"{uniform_entropy(train):.3f} nats/token")
    table.add_row("held-out loss from token frequencies alone", f"{unigram_entropy(train, heldout):.3f} nats/token")
    table.add_row("held-out loss of the trained model", f"[bold]{last_validation(run):.3f}[/] nats/token")
    table.add_row("seconds: training, everything", f"{train_seconds:.0f}, {time.monotonic() - start:.0f}")
    table.add_row("evaluation result", os.path.relpath(results[-1], ROOT))
    table.add_row("run directory", os.path.relpath(run, ROOT))
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
