"""What an earlier version wrote is read by this one, and gives the numbers that the earlier one gave.

The files of each version in `tests/fixtures/COMMIT` come from `make_fixture.py`. Rounding depends on the processor and
on torch: on those of the fixture the losses must be equal to the last bit.
"""

from __future__ import annotations

import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import efla_lm  # noqa: F401  (registers the model family with transformers)
from scripts import export
from tests.training.launch import MODELS, one_thread, steady_rows

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.fixture(scope="module", params=sorted(path.name for path in FIXTURES.iterdir()))
def version(request: pytest.FixtureRequest) -> Path:
    """The folder of one earlier version in tests/fixtures."""
    return FIXTURES / str(request.param)


@pytest.fixture(scope="module")
def expected(version: Path) -> dict[str, Any]:
    return json.loads((version / "expected.json").read_text())


@pytest.fixture
def files(version: Path, tmp_path: Path) -> Path:
    """A fresh copy of what the version wrote; `make_fixture.py` lists it."""
    with tarfile.open(version / "files.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_run_continues_with_the_numbers_of_the_run_that_never_stopped(files: Path, expected: dict[str, Any]) -> None:
    import train

    places = [f"data.sources=[{files / 'text.jsonl'}]", f"data.dir={files / 'tokens'}", f"runs_dir={files / 'runs'}"]
    with one_thread():
        assert train.main.run([*expected["options"], *places, "name=stopped"], program="train.py") == 0
    assert (files / "runs" / "stopped" / "export" / "model.safetensors").is_file()
    rows = steady_rows(files / "runs", "stopped")
    later = ("skipped_steps", "clip_scale")  # keys that the fixture does not hold
    ours = [{key: value for key, value in row.items() if key not in later} for row in rows]
    assert all(0 < row["clip_scale"] <= 1 for row in rows if "loss" in row and row["step"] > 6)  # it was stopped there
    assert len((files / "runs" / "stopped" / "launches.jsonl").read_text().splitlines()) == 2, "it began from nothing"
    assert [list(row) for row in ours] == [list(row) for row in expected["rows"]]
    same_rounding = (expected["torch"], expected["processor"]) == (
        torch.__version__,
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    )
    for row, wanted in zip(ours, expected["rows"], strict=True):
        assert row == (wanted if same_rounding else pytest.approx(wanted, rel=1e-5))


@pytest.mark.parametrize("exported", [False, True], ids=["run", "its export"])
def test_eval_gives_the_same_figures(exported: bool, files: Path, expected: dict[str, Any]) -> None:
    """eval.py on the checkpoint, and on what scripts.export makes of it."""
    import eval as command

    checkpoint = files / "runs" / "stopped"
    if exported:
        assert export.main.run([f"checkpoint={checkpoint}", f"out={files / 'out'}"]) == 0
        checkpoint = files / "out"
    arguments = [f"checkpoint={checkpoint}", f"tasks.data_dir={files / 'tokens'}", "tasks=heldout", "device=cpu"]
    assert command.main.run([*arguments, f"out={files / 'results'}"], program="eval.py") == 0
    (result,) = (files / "results").glob("*.json")
    ours = json.loads(result.read_text())["results"]["heldout"]
    assert ours.keys() == expected["heldout"].keys()
    for name, wanted in expected["heldout"].items():
        assert ours[name] == (wanted if isinstance(wanted, str) else pytest.approx(wanted, rel=1e-5)), name


@pytest.mark.parametrize("model", MODELS)
def test_exports_predict_the_same(model: str, files: Path, expected: dict[str, Any]) -> None:
    ids, wanted = torch.tensor(expected["ids"]), load_file(files / "logits.safetensors")[model]
    loaded = AutoModelForCausalLM.from_pretrained(files / "exports" / model).eval()
    with torch.no_grad():
        logits = loaded(ids).logits[:, [4, 19]]
    assert (logits - wanted).norm() <= 1e-6 * wanted.norm()
