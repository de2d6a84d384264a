"""The discretisation error of a trained model: `python -m scripts.stability checkpoint=RUN`.

What an explicit Euler step would have done with the model's own keys, values and gates, per layer and head; how large
beta lam is; how much of a corruption of the first half of a text stays in the state. JSON, table and figure;
`replot=FILE.json` makes the last two again.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from efla_data.loader.token_file import TokenFile

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.settings import CHECKPOINT
from efla_lm.settings import PATH, PATH_OR_HUB, entry, key
from scripts.stability.discretisation import euler_error, record, survival
from scripts.stability.report import write_report
from scripts.study import result_file
from scripts.study.checks import expect_above_zero, expect_at_least


@dataclass
class StabilitySettings:
    """All of `python -m scripts.stability`."""

    checkpoint: str | None = key(None, f"{CHECKPOINT}; needed unless replot is given", path=PATH_OR_HUB)
    data_dir: str | None = key(None, "token files whose held-out part is read; null: those of the run", path=PATH)
    sequences: int = key(8, "sequences of held-out text")
    tokens: int | None = key(None, "length of a sequence; null: the training context")
    sizes: list[float] = key([0.1, 0.3, 1.0], "noise on embeddings, in units of their standard deviation")
    seed: int = key(0, "seed of the noise")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    figures: bool = key(True, "draw the figure, not only JSON and table")
    out: str = key("results/stability", "folder of what is written", path=PATH)
    replot: str | None = key(None, "a result file to report on, instead of measuring", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no measurement can use."""
        if self.checkpoint is None and self.replot is None:
            raise UserError("checkpoint: expected a run, an export or a model folder (or replot=FILE.json)")
        expect_at_least(self, 1, "sequences")
        expect_at_least(self, 2, "tokens")
        expect_above_zero(self, "sizes")


@entry("stability", StabilitySettings)
def main(settings: StabilitySettings) -> None:
    """Measure the discretisation error of a trained delta-rule model; write JSON, table and figure."""
    folder = Path(settings.out)
    if settings.replot is not None:
        content = result_file.read(settings.replot, experiment="stability")
    else:
        result_file.check_output(folder / "stability.json")
        content = measure(settings)
        result_file.write(folder / "stability.json", content)
    print(write_report(content, folder, settings.figures))
    print(f"written to {folder}")


def measure(settings: StabilitySettings) -> dict:
    """Load the model and its held-out text, and measure."""
    device = choose_device(settings.device)
    assert settings.checkpoint is not None
    checkpoint = checkpoints.find(settings.checkpoint)
    model, tokenizer = checkpoints.load(checkpoint)
    checkpoints.place(model, "fp32", device)
    tokens = settings.tokens or checkpoints.context_length(model, tokenizer)
    ids = heldout_sequences(checkpoint, settings, tokens).to(device)
    layers = record(model, ids)
    return {
        "experiment": "stability",
        "checkpoint": os.path.relpath(checkpoint.location) if checkpoint.kind != "hub" else checkpoint.location,
        "weights": checkpoints.weights_hash(model),
        "mixer": model.config.mixer,
        "sequences": len(ids),
        "tokens": tokens,
        "environment": result_file.environment(device),
        "command": result_file.command_line("stability", settings),
        "layers": [euler_error(layer) for layer in layers],
        "survival": survival(model, ids, tuple(settings.sizes), settings.seed),
    }


def heldout_sequences(checkpoint: checkpoints.Checkpoint, settings: StabilitySettings, tokens: int) -> torch.Tensor:
    """[sequences, tokens] ids from the start of the held-out text. Raises UserError where it is too short."""
    folder = Path(settings.data_dir) if settings.data_dir else checkpoints.token_folder(checkpoint)
    text = TokenFile.open(folder, "heldout")
    wanted = settings.sequences * tokens
    if text.num_tokens < wanted:
        raise UserError(
            f"{folder}: the held-out part has {text.num_tokens} tokens, {settings.sequences} sequences of {tokens} "
            f"need {wanted}; set sequences or tokens lower"
        )
    return torch.from_numpy(np.asarray(text.tokens[:wanted], dtype=np.int64)).view(settings.sequences, tokens)


if __name__ == "__main__":
    main()
