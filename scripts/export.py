"""A training checkpoint as a Hugging Face folder: `python -m scripts.export checkpoint=RUN [out=FOLDER]`."""

from __future__ import annotations

from pathlib import Path

from efla_lm.run.checkpoint import find_checkpoint, weights_damage
from efla_lm.run.export import export_checkpoint
from efla_lm.settings import ExportSettings, entry


@entry("export", ExportSettings)
def main(settings: ExportSettings) -> int:
    """Write config, fp32 weights (safetensors) and tokenizer of a checkpoint to a folder that transformers loads."""
    step_dir = find_checkpoint(Path(settings.checkpoint), fault=weights_damage)
    out = Path(settings.out) if settings.out else step_dir.parent.parent / "export"
    export_checkpoint(step_dir, out, verified=True)
    print(f"exported {step_dir} to {out}")
    return 0


if __name__ == "__main__":
    main()
