"""Train the six models with two versions of this repository and compare every number bit for bit:

    python tests/equality/compare_trees.py BEFORE AFTER
    python tests/equality/compare_trees.py BEFORE --out docs/results/house_losses_before_cpu.json

BEFORE and AFTER are source trees (a checkout, or `git worktree add --detach FOLDER COMMIT`) or files that an earlier
call wrote with --out. With two of them the exit code is 1 if any number differs; with one, it is only recorded.

Each model trains on the CPU through the command lines of `scripts.prepare` and `train.py`: size tiny, the built-in
corpus, 50 steps of two micro-batches, fp32, one thread. Compared are the loss and the gradient norm of every step, the
validation loss, and SHA-256 of the token files and of the exported weights. Two processors may round differently: two
records agree only if one kind of processor and one version of torch made both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MODELS = ("efla", "gated_efla", "deltanet", "gated_deltanet", "mamba2", "transformer")
STEPS = 50
OPTIONS = (
    "size=tiny", "data=pydoc", f"train.steps={STEPS}", "train.batch_tokens=1024", "train.micro_tokens=512",
    "train.device=cpu", "train.precision=fp32", "train.log_every=1", "train.validate_every=null",
    "train.save_every=null", "seed=42",
)  # fmt: skip


def run(tree: Path, folder: Path, *arguments: str) -> None:
    """Run one command of `tree` in `folder`; raises RuntimeError with its output if it fails.

    -S leaves out this environment's editable install: its modules would stand in for those that `tree` lacks.
    """
    path = [tree, tree / "kernels", tree / "data", Path(sysconfig.get_path("purelib"))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-S", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout}{done.stderr}")


def digest_weights(export: Path) -> str:
    """SHA-256 over name, type, shape and bytes of every exported tensor, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(export / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def record_model(tree: Path, folder: Path, tokens: Path, model: str) -> dict[str, Any]:
    """Train one model and read its numbers."""
    options = [f"model={model}", *OPTIONS, f"data.dir={tokens}", f"runs_dir={folder / 'runs'}", f"name={model}"]
    run(tree, folder, str(tree / "train.py"), *options)
    directory = folder / "runs" / model
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    if [row["step"] for row in steps] != list(range(1, STEPS + 1)):
        raise RuntimeError(f"{model}: expected one row for each of {STEPS} steps, got {len(steps)}")
    return {
        "loss": [row["loss"] for row in steps],
        "grad_norm": [row["grad_norm"] for row in steps],
        "val_loss": next(row["val_loss"] for row in rows if "val_loss" in row),
        "weights_sha256": digest_weights(directory / "export"),
    }


def record_tree(tree: Path) -> dict[str, Any]:
    """Prepare the corpus and train all models with the code of `tree`."""
    commit = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True)
    with tempfile.TemporaryDirectory(prefix="efla-equality-") as name:
        folder = Path(name)
        tokens = folder / "tokens"
        run(tree, folder, "-m", "scripts.prepare", "data=pydoc", f"data.dir={tokens}")
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tokens.glob("*.bin"))}
        models = {}
        for model in MODELS:
            models[model] = record_model(tree, folder, tokens, model)
            print(f"{model}: loss {models[model]['loss'][0]:.4f} to {models[model]['loss'][-1]:.4f}", flush=True)
    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "options": list(OPTIONS),
        "token_files_sha256": files,
        "models": models,
    }


def load(source: Path) -> dict[str, Any]:
    """The record in a file, or that of a tree, which is trained first."""
    return json.loads(source.read_text()) if source.is_file() else record_tree(source.resolve())


def differences(before: Any, after: Any, place: str) -> list[str]:
    """Every value in which two records differ, by its place in them."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [text for key in keys for text in differences(before.get(key), after.get(key), f"{place} {key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after), start=1)
        return [text for step, (a, b) in pairs for text in differences(a, b, f"{place} step {step}")]
    return [] if before == after else [f"{place}: {before!r} before, {after!r} after"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="source tree, or a file written with --out")
    parser.add_argument("after", type=Path, nargs="?", help="the same; without it, BEFORE is recorded only")
    parser.add_argument("--out", type=Path, help="JSON file for the record of the last of them")
    arguments = parser.parse_args()
    before = load(arguments.before)
    after = before if arguments.after is None else load(arguments.after)
    if arguments.out:
        arguments.out.write_text(json.dumps(after, indent=1) + "\n")
    if arguments.after is None:
        return 0
    for key in ("torch", "processor", "options"):
        if before[key] != after[key]:
            print(f"note: {key} is {before[key]} before and {after[key]} after")
    found = differences(before["token_files_sha256"], after["token_files_sha256"], "token file")
    found += differences(before["models"], after["models"], "model")
    for text in found[:40]:
        print(text)
    numbers = len(MODELS) * (2 * STEPS + 1)
    print(f"{len(found)} differences" if found else f"equal: {numbers} numbers and {len(MODELS)} models' weights")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
