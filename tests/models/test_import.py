"""Importing the package registers the models and stays light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("fla", "lm_eval", "datasets", "hydra", "wandb", "matplotlib", "pandas", "efla_data")


def test_import_registers_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, efla_lm\n"
        "from transformers import AutoConfig\n"
        "print(AutoConfig.for_model('efla_lm').mixer)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[:2] == ["efla", "[]"]
