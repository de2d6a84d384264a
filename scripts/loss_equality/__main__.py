"""The same 100 updates in different ways: compiled or not, torch or Triton, one process or two:

    python -m scripts.loss_equality                    what this machine can run, on the built-in corpus
    python -m scripts.loss_equality size=340m context=2048 batch_tokens=32768 data_dir=FOLDER
    python -m scripts.loss_equality "reference='triton, compiled, graphs'" \\
        "variants=['triton, half micro-batches','2 processes, fsdp','2 processes, ddp']" ...        two GPUs and one

Writes losses and their differences from the reference to `out`, and a plot beside it. Exit code 1 if a variant fails
or differs by more than `tolerance`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from efla_kernels.environment import describe_environment

from efla_lm.settings import check_output, entry, to_dict
from scripts.loss_equality import run as equality
from scripts.loss_equality.run import EqualitySettings


@entry("loss_equality", EqualitySettings)
def main(settings: EqualitySettings) -> int:
    """Train the same model on the same batches in different ways and compare the losses."""
    out = Path(settings.out)
    check_output(out)
    names = equality.chosen(settings, torch.cuda.device_count())
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="efla-equality-") as folder:
        for name, found in equality.run(settings, names, Path(folder)):
            if isinstance(found, str):
                failed[name] = found
                print(f"{name:<28} {found}", flush=True)
                if name == settings.reference:
                    return 1
            else:
                losses[name] = found
                print(f"{name:<28} loss {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    differences = equality.differences(losses, settings.reference)
    kept = {name: value for name, value in to_dict(settings).items() if name not in ("out", "data_dir")}  # not places
    result = {
        "environment": describe_environment(), "settings": kept, "differences": differences, "failed": failed,
        "losses": losses,
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    equality.plot(result, out.with_suffix(".png"))
    for name, found_by in differences.items():
        print(f"{name:<28} differs by {found_by['largest']:.1e} at most, {found_by['last']:.1e} at the end")
    print(f"{out}; plot: {out.with_suffix('.png')}")
    apart = [name for name, found_by in differences.items() if found_by["largest"] > settings.tolerance]
    if apart:
        print(f"beyond tolerance={settings.tolerance:g}: {', '.join(apart)}")
    return 1 if apart or failed else 0


if __name__ == "__main__":
    main()
