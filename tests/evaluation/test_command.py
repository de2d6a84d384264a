"""`eval.py` and `python -m scripts.generate` as their user types them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from efla_lm.evaluation import checkpoints, hub, runner
from scripts import generate
from scripts.eval_compare import __main__ as eval_compare
from tests.evaluation.material import (
    CONTEXT,
    PAPER,
    local_file,
    make_model,
    make_tokenizer,
    save_export,
    write_run,
    write_task_files,
    write_tokens,
)

TEXTS = ["the river of stone and light under winter", "a quiet letter in the paper window " * 20]


@pytest.fixture
def evaluate() -> Any:
    import eval as command

    return command.main.run


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local copies and held-out text need no connection: trying one is an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def read_result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("kind", ["efla", "llama"])
def test_ten_local_tasks_give_one_file_and_one_table(
    kind: str, evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = save_export(tmp_path / "export", kind, bos=True)
    data = write_task_files(tmp_path / "data")
    arguments = [f"checkpoint={export}", f"tasks.local_dir={data}", "limit=3", f"out={tmp_path}/out", "device=cpu"]
    assert evaluate(arguments) == 0
    result = read_result(tmp_path / "out")
    assert list(result["results"]) == PAPER
    assert 0 <= result["results"]["hellaswag"]["acc_norm,none"] <= 1
    assert result["results"]["lambada_openai"]["perplexity_stderr,none"] > 0
    assert result["results"]["piqa"]["sample_len"] == 3
    assert result["n-samples"]["wikitext"] == {"original": 5, "effective": 3}
    assert result["versions"]["boolq"] == 2.0
    assert set(result["n-shot"].values()) == {0}
    assert set(result["sources"]) == set(PAPER)
    assert result["missing"] == {}
    about = result["evaluation"]
    assert about["start_token"]["contexts_open_with_bos"] is True
    assert about["start_token"]["prefix_token"] == "<s>"
    assert about["context"] == CONTEXT
    assert about["dtype"] == "fp32"
    assert about["model"]["family"] == kind
    assert about["model"]["size"] is None
    assert about["settings"]["seed"] == 1234
    assert about["library_versions"]["lm_eval"]
    model, _ = checkpoints.load(checkpoints.find(str(export)))
    assert about["weights_sha256"] == checkpoints.weights_hash(model)
    shown = capsys.readouterr().out
    assert "word_perplexity" in shown
    assert "mean of the nine accuracies" in shown
    assert "result: " in shown


def test_a_missing_file_is_named_and_the_other_tasks_are_reported(
    evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, data = save_export(tmp_path / "export"), write_task_files(tmp_path / "data")
    local_file(data, "piqa").unlink()
    arguments = [f"checkpoint={export}", "tasks=custom", "tasks.names=[piqa,sciq]", f"tasks.local_dir={data}"]
    assert evaluate([*arguments, f"out={tmp_path}/out"]) == 1
    result = read_result(tmp_path / "out")
    assert list(result["results"]) == ["sciq"]
    assert list(result["missing"]) == ["piqa"]
    shown = capsys.readouterr()
    assert f"error: task piqa: no file {data}/piqa*_validation.jsonl[.gz]" in shown.err
    assert "missing" in shown.out


def test_nothing_there_at_all_still_ends_with_a_file_and_exit_code_1(
    evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = save_export(tmp_path / "export")
    assert evaluate([f"checkpoint={export}", f"tasks.local_dir={tmp_path}/none", f"out={tmp_path}/out"]) == 1
    assert list(read_result(tmp_path / "out")["missing"]) == PAPER
    names = ", ".join(PAPER)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said == [f"error: tasks {names}: the folder {tmp_path}/none does not exist (tasks.local_dir)"]


def test_without_a_network_hub_tasks_are_named_quickly(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets.config
    import huggingface_hub.constants

    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    monkeypatch.setattr(hub, "_answers", lambda url: False)
    run = write_run(tmp_path / "run", texts=TEXTS)
    arguments = [f"checkpoint={run}", "tasks=custom", "tasks.names=[piqa,sciq,heldout]"]
    assert evaluate(arguments) == 1
    result = read_result(run / "results")
    assert list(result["results"]) == ["heldout"]
    assert "tasks.local_dir=FOLDER" in result["missing"]["piqa"]
    said = capsys.readouterr().err
    assert "does not answer; using local caches only" in said
    assert said.count("error:") == 1 and "error: tasks piqa, sciq: the hub is out of reach" in said


def test_held_out_text_needs_the_run_directory_alone(evaluate: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", texts=TEXTS)
    assert evaluate([f"checkpoint={run}", "tasks=heldout"]) == 0
    numbers = read_result(run / "results")["results"]["heldout"]
    assert numbers["word_perplexity,none"] > numbers["byte_perplexity,none"] > 1
    assert numbers["bits_per_byte,none"] > 0


def test_held_out_text_of_a_bare_model_needs_a_folder(
    evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, tokens = save_export(tmp_path / "model"), write_tokens(tmp_path / "tokens", TEXTS)
    arguments = [f"checkpoint={export}", "tasks=heldout", f"out={tmp_path}/out"]
    assert evaluate(arguments) == 1
    assert "give tasks.data_dir=FOLDER" in capsys.readouterr().err
    assert evaluate([*arguments, f"tasks.data_dir={tokens}"]) == 0


def test_a_second_result_does_not_replace_the_first(evaluate: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", texts=TEXTS[:1])
    for _ in range(2):
        assert evaluate([f"checkpoint={run}", "tasks=heldout"]) == 0
    assert len(list((run / "results").glob("heldout-export-*.json"))) == 2
    assert not list((run / "results").glob("*.tmp"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("{tmp}/nowhere", "no such folder; expected a run"),
        ("{tmp}/empty", "expected a run (checkpoints/, export/) or a model (config.json) in it"),
        ("{tmp}/started", "neither a whole checkpoint nor an export yet"),
        ("{tmp}/bare", "no tokenizer here"),
        ("{tmp}/wide", "the tokenizer has ids up to 339, the model 330 embeddings"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_clear_line(
    given: str, complaint: str, evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.yaml").write_text("data: {}\n")
    make_model("efla").save_pretrained(tmp_path / "bare")
    make_model("efla").save_pretrained(tmp_path / "wide")
    make_tokenizer(False, 340).save_pretrained(tmp_path / "wide")
    capsys.readouterr()
    assert evaluate([f"checkpoint={given.format(tmp=tmp_path)}", f"tasks.local_dir={tmp_path}"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert complaint in lines[-1]


def test_damaged_weights_are_one_clear_line(evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = save_export(tmp_path / "export")
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    capsys.readouterr()
    assert evaluate([f"checkpoint={export}", f"tasks.local_dir={tmp_path}"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_misspelt_key_and_a_missing_checkpoint_are_usage_errors(
    evaluate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(["checkpoint=x", "tasks.locl_dir=y"]) == 2
    assert "tasks.local_dir" in capsys.readouterr().err
    assert evaluate([]) == 2
    assert "checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("limit=0", "limit=0: expected at least 1"),
        ("context=0", "context=0: expected at least 1"),
        ("bootstrap=-1", "bootstrap=-1: expected 0 or more"),
        ("seed=-1", "seed=-1: expected 0 or more"),
        ("batch_size=²", "batch_size=²: expected a positive number"),
        ("batch_size=0", "batch_size=0: expected a positive number"),
        ("batch_size=many", "batch_size=many: expected a positive number"),
        ("tasks.num_fewshot=2", "local copies hold the evaluated split only"),
        ("tasks.names=[]", "tasks.names is empty"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(
    bad: str, complaint: str, evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = save_export(tmp_path / "export")
    assert evaluate([f"checkpoint={export}", f"tasks.local_dir={tmp_path}", bad]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("trained", [False, True])
def test_a_start_token_that_training_did_not_use_is_pointed_out(
    trained: bool, evaluate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", texts=TEXTS[:1])
    with (run / "config.yaml").open("a") as config:
        config.write(f"  bos: {str(trained).lower()}\n")
    assert evaluate([f"checkpoint={run}", "tasks=heldout"]) == 0
    assert ("warning: trained with data.bos=True" in capsys.readouterr().err) == trained
    assert read_result(run / "results")["evaluation"]["start_token"]["trained_with_bos"] is trained


@pytest.mark.parametrize("kind", ["gated_efla", "mamba2", "llama"])
def test_bf16_keeps_the_decay_parameters_in_fp32(kind: str, tmp_path: Path) -> None:
    model, _ = checkpoints.load(checkpoints.find(str(save_export(tmp_path / "export", kind))))
    checkpoints.place(model, "bf16", torch.device("cpu"))
    kept = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"gated_efla": {"A_log", "dt_bias"}, "mamba2": {"A_log", "dt_bias", "D"}, "llama": set()}[kind]
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.isfinite().all()


def generated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert generate.main.run(arguments) == 0
    return capsys.readouterr().out


def test_generation_continues_the_prompt_and_repeats_with_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    base = [f"checkpoint={run}", 'prompt="the river"', "max_new_tokens=12"]
    greedy = generated(base, capsys)
    assert greedy.startswith("the river")
    assert len(greedy) > len("the river\n")
    assert generated([*base, "seed=5"], capsys) == greedy
    sampled = [generated([*base, "temperature=1.5", f"seed={seed}"], capsys) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    model, tokenizer = checkpoints.load(checkpoints.find(str(run)))
    ids = tokenizer("the river", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1)
    assert greedy == tokenizer.decode(out[0], skip_special_tokens=True) + "\n"


def test_generation_refuses_what_greedy_choice_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("top_k=5", "top_p=0.9"):
        assert generate.main.run([f"checkpoint={tmp_path}", "prompt=a", given]) == 1
        assert f"error: {given} says what is sampled from, but temperature=0" in capsys.readouterr().err
        assert generate.main.run([f"checkpoint={tmp_path}", "prompt=a", given, "temperature=1"]) == 1
        assert "expected a run" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named_before_the_work(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = write_run(tmp_path / "run", texts=TEXTS), tmp_path / "file"
    file.touch()
    monkeypatch.setattr(runner, "run_tasks", lambda *args, **kwargs: pytest.fail("the tasks were run"))
    assert evaluate([f"checkpoint={run}", "tasks=heldout", f"out={file}"]) == 1
    assert f"error: {file}: file exists (out={file}); a file is in the way" in capsys.readouterr().err
    assert eval_compare.main.run([f"checkpoint={run}", f"out={tmp_path}"]) == 1
    assert f"error: {tmp_path}: is a directory (out={tmp_path}); expected a file" in capsys.readouterr().err


def test_a_name_that_is_no_folder_was_taken_for_the_hubs(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert evaluate(["checkpoint=models/mistyped", "tasks=heldout"]) == 1
    said = capsys.readouterr().err
    assert "models/mistyped" in said and "no folder of that name is here" in said


@pytest.mark.parametrize(
    "bad", ["temperature=-1", "top_p=0", "top_k=0", "max_new_tokens=0", f"seed={1 << 32}", "prompt=a\udcff"]
)
def test_generation_refuses_values_out_of_range(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert generate.main.run([f"checkpoint={run}", 'prompt="the"', bad]) == 1
    assert bad.partition("=")[0] in capsys.readouterr().err


def test_generation_starts_from_nothing_with_the_prefix_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert generated([f"checkpoint={run}", "prompt=''", "max_new_tokens=8"], capsys).strip()
