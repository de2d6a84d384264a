"""The same 100 steps computed in different ways: compiled or not, torch or Triton, one process or two:

    python -m scripts.loss_equality                    what this machine can run, on the built-in corpus
    python -m scripts.loss_equality size=340m context=2048 batch_tokens=32768 data_dir=FOLDER
    python -m scripts.loss_equality "reference='triton, compiled, graphs'" \\
        "variants=['triton, half micro-batches','2 processes, fsdp','2 processes, ddp']" ...        two GPUs and one

Writes losses and their differences from the reference to `out`, and a plot beside it. Variants that `out` has already,
from the same settings and code, are not run again. Exit code 1 if a variant fails or differs by more than `tolerance`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from efla_kernels.environment import describe_environment

from efla_lm.settings import entry
from scripts.loss_equality import run as equality
from scripts.loss_equality.run import EqualitySettings
from scripts.study.result_file import ResultFile, command_line, portable


@entry("loss_equality", EqualitySettings)
def main(settings: EqualitySettings) -> int:
    """Train the same model on the same batches in different ways and compare the losses."""
    head = {
        "environment": describe_environment(),
        "command": command_line("loss_equality", settings),
        "settings": portable(settings, without=("variants", "at_once", "limit_s")),
    }
    result = ResultFile(Path(settings.out), head, rows="losses")
    losses, failed = result.content["losses"], {}
    names = equality.chosen(settings, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="efla-equality-") as folder:
        for name, found in equality.run(settings, [n for n in names if n not in losses], Path(folder)):
            if isinstance(found, str):
                failed[name] = found
                print(f"{name:<28} {found}", flush=True)
                if name == settings.reference:
                    return 1
            else:
                losses[name] = found
                result.finish(name)
                print(f"{name:<28} loss {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    differences = equality.differences(losses, settings.reference)
    result.content |= {"differences": differences, "failed": failed}
    result.save()
    equality.plot(result.content, result.path.with_suffix(".png"))
    for name, difference in differences.items():
        print(f"{name:<28} differs by {difference['largest']:.1e} at most, {difference['last']:.1e} at the end")
    print(f"{result.path}; plot: {result.path.with_suffix('.png')}")
    apart = [name for name, difference in differences.items() if difference["largest"] > settings.tolerance]
    if apart:
        print(f"beyond tolerance={settings.tolerance:g}: {', '.join(apart)}")
    return 1 if apart or failed else 0


if __name__ == "__main__":
    main()
