"""What EFLA's gate and its values each change against DeltaNet, in language modelling, with intervals:

    python -m scripts.lm_study data_dir=FOLDER                                  every trial; again to continue
    python -m scripts.lm_study data_dir=FOLDER tokens=10485760 budget_seconds=480 parallel_runs=2
    python -m scripts.lm_study replot=results/lm_study/lm_study.json             tables and figures alone

Every trial is a run of train.py. First all arms meet all rates with the first seeds (`sweep_seeds`); then the further
seeds train every arm at the rates that are best for some arm. `out/lm_study.json` holds every run as it ended; trials
that it has are not run again, and a run that was stopped continues from its checkpoint if its folder is there, else
from the start.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from efla_data.loader.token_file import TokenFile

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.models import EflaConfig, count_parameters
from efla_lm.settings import TrainSettings, check_output, compose, entry
from scripts.lm_study.analysis import Study
from scripts.lm_study.report import write_report
from scripts.lm_study.run import ENDED, Record, Trainers
from scripts.lm_study.settings import LmStudySettings, Trial, repeats, sweep, train_arguments
from scripts.study import result_file

EXPERIMENT = "lm_study"
# of the settings, what all runs of one result file share; arms, rates and seeds may grow
FIXED = ("name", "size", "context", "tokens", "batch_tokens", "warmup", "floor", "validations", "train")
ENVIRONMENT = ("device", "driver", "torch", "triton", "commit")  # of every run
GRID = ("arms", "rates", "seeds", "sweep_seeds")


@entry(EXPERIMENT, LmStudySettings)
def main(settings: LmStudySettings) -> int:
    """Train the arms of the factorial over rates and seeds; write JSON, tables and figures."""
    folder = Path(settings.out)
    path = folder / "lm_study.json"
    if settings.replot:
        content = result_file.read(settings.replot, experiment=EXPERIMENT)
        print(write_report(content, folder, settings.figures))
        return 0
    check_output(path)
    deadline = None if settings.budget_seconds is None else time.time() + settings.budget_seconds
    content = open_results(path, settings)
    found = result_file.environment(choose_device("auto"))
    here = {name: found[name] for name in ENVIRONMENT}
    parameters = {arm: parameters_of(arm, settings) for arm in settings.arms}

    def keep(record: Record) -> None:
        record |= {"parameters": parameters[record["arm"]], "environment": here}
        content["runs"] = [run for run in content["runs"] if trial_of(run) != trial_of(record)] + [record]
        result_file.write(path, content)
        loss = record["heldout"] or f"{record['state']} {record.get('reason', '')}"
        print(f"{trial_of(record).name:<32} {loss:<22} {record['seconds']:.1f} s", flush=True)

    with Trainers(settings, deadline) as trainers:
        complete = trainers.run(missing(sweep(settings), content), keep)
        if complete:
            further = repeats(settings, Study.of(content).kept_rates())
            complete = trainers.run(missing(further, content), keep)
    if content["runs"]:
        print(write_report(content, folder, settings.figures))
    print(f"written to {folder}; {'all trials are done' if complete else 'the same command continues'}")
    return int(any(run["state"] == "failed" for run in content["runs"]))


def trial_of(run: Record) -> Trial:
    """The trial of a record."""
    return Trial(run["arm"], run["rate"], run["seed"])


def missing(trials: list[Trial], content: dict[str, Any]) -> list[Trial]:
    """The trials that have no end in the result file."""
    ended = {trial_of(run) for run in content["runs"] if run["state"] in ENDED}
    return [trial for trial in trials if trial not in ended]


def open_results(path: Path, settings: LmStudySettings) -> dict[str, Any]:
    """The result file of the study, or a new one, with this command's grid.

    Raises:
        UserError: it belongs to another study: a setting that its runs share differs.
    """
    prints = {split: TokenFile.open(settings.data_dir, split).fingerprint for split in ("train", "heldout")}
    plan = {name: getattr(settings, name) for name in (*FIXED, *GRID)}
    if not path.exists():
        return {"experiment": EXPERIMENT, "plan": plan, "data": prints, "runs": []}
    content = result_file.read(path, experiment=EXPERIMENT)
    for name in FIXED:
        if content["plan"][name] != plan[name]:
            raise UserError(
                f"{name}: got {plan[name]}, but the runs in {path} have {content['plan'][name]}: set it so, or "
                "another out="
            )
    if content["data"] != prints:
        raise UserError(
            f"data_dir: the runs in {path} were trained on other token files: set that folder, or another out="
        )
    content["plan"] = plan
    return content


def parameters_of(arm: str, settings: LmStudySettings) -> int:
    """Parameters of an arm; composing its settings names a wrong key before anything is trained."""
    composed = compose(
        "train", train_arguments(Trial(arm, settings.rates[0], settings.seeds[0]), settings), TrainSettings
    )
    vocab = composed.model.vocab_size or TokenFile.open(settings.data_dir, "train").vocab_size
    return count_parameters(EflaConfig(**{**vars(composed.model), "vocab_size": vocab}))


if __name__ == "__main__":
    main()
