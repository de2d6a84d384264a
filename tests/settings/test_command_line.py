"""What people type: every slip costs one line that names the key and the way out."""

import dataclasses
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, UsageError, compose, entry, key
from efla_lm.settings.compose import CONFIG_DIR


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.steps=3", ["'trian.steps'", "'train.steps'"]),
        ("train.stpes=3", ["'train.steps'"]),
        ("steps=3", ["'train.steps'"]),
        ("learning_rate=3", ["'learning_rate'", "'schedule.peak'"]),
        ("lr=3", ["'lr'", "'schedule.peak'"]),
        ("train.lr=3", ["'schedule.peak'"]),
        ("optim.lr=3", ["'schedule.peak'"]),
        ("model.learning_rate=3", ["'schedule.peak'"]),
        ("seq_len=3", ["'data.context'"]),
        ("train.seq_len=3", ["'data.context'"]),
        ("batch_size=3", ["'train.batch_tokens'", "counts tokens"]),
        ("train.batch_size=3", ["'train.batch_tokens'"]),
        ("epochs=3", ["'train.tokens'", "one epoch is"]),
        ("max_steps=3", ["'train.steps'"]),
        ("warmup_steps=3", ["'schedule.warmup_updates'"]),
        ("grad_clip=1", ["'train.clip_norm'"]),
        ("dtype=bf16", ["'train.precision'"]),
        ("zzzz=1", ["no key has a similar name"]),
        ("schedule.peek=1e-3", ["'schedule.peak'"]),
        ("model=elfa", ["model=elfa", "model=efla", "mamba2"]),
        ("size=340", ["size=340m"]),
        ("experiment=dmo", ["experiment=demo"]),
        ("data=null", ["data=null", "pydoc"]),
        ("train.steps=abc", ["train.steps", "int or null", "abc"]),
        ("train.tokens=1.5", ["train.tokens", "int", "1.5"]),
        ("train.batch_tokens=null", ["train.batch_tokens", "expected int", "null"]),
        ("train.batch_tokens=", ["train.batch_tokens", "got nothing"]),
        ("train.log_batches=maybe", ["train.log_batches", "true or false"]),
        ("optim.betas=[0.9,x]", ["optim.betas", "list of float"]),
        ("data.sources=a.txt", ["data.sources=[a.txt]"]),
        ("train.precision=fp23", ["train.precision", "fp32", "bf16"]),
        ("model.mixer=elfa", ["model.mixer", "efla"]),
        ("train.steps=1,2", ["one value per run"]),
        ("model=efla,deltanet", ["one value per run"]),
        ("model=[efla,deltanet]", ["model=[efla,deltanet]", "one option", "model=efla"]),
        ("size=[tiny]", ["one option", "size=tiny"]),
        ("data=[]", ["one option"]),
        ("parallel=[ddp,fsdp]", ["one option"]),
        ("logger=[wandb,tensorbord]", ["did you mean logger=tensorboard"]),
        ("data.sources=[a,,b]", ["cannot be read", "[a,,b]"]),
        ("train={steps: 3}", ["section", "train.tokens=VALUE"]),
        ("+train.new=1", ["train.new"]),
        ("~train.steps", ["~"]),
        ("data@model=pydoc", ["without @"]),
        ("seed", ["key=value"]),
        ("train.steps=[1", ["cannot be read"]),
        ("train.steps='", ["cannot be read"]),
        ("train.steps=${nowhere}", ["train.steps", "nowhere"]),
        ("train.steps=${size.name}", ["train.steps", "tiny"]),
        ("schedule.peak=nan", ["schedule.peak", "nan", "finite"]),
        ("train.clip_norm=inf", ["train.clip_norm", "inf", "finite"]),
        ("optim.betas=[0.9,nan]", ["optim.betas", "nan", "finite"]),
        ("model.norm_eps=-inf", ["model.norm_eps", "-inf", "finite"]),
    ],
)
def test_slip_costs_one_line(override, words):
    with pytest.raises(UsageError) as caught:
        compose("train", [override], TrainSettings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_text_of_string_keys_is_taken_as_typed():
    settings = compose("train", ["name=007", "logger.wandb_project=a, b (c)", "data.text_field='x y'"], TrainSettings)
    assert settings.name == "007"
    assert settings.logger.wandb_project == "a, b (c)"
    assert settings.data.text_field == "x y"
    assert compose("train", ["name=null"], TrainSettings).name is None
    assert compose("train", ["name=${size.name}-1"], TrainSettings).name == "tiny-1"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("'x y'", "x y"),
        ('"x"', "x"),
        ("'a' and 'b'", "'a' and 'b'"),
        ('"a" is "b"', '"a" is "b"'),
        ("'", "'"),
        ("''", ""),
        ("it's", "it's"),
        ("'it\"s'", 'it"s'),
    ],
)
def test_quotes_around_a_text_go_and_quotes_of_a_text_stay(raw, text):
    assert compose("train", [f"data.text_field={raw}"], TrainSettings).data.text_field == text


@pytest.mark.parametrize(
    ("raw", "items"),
    [
        ("[/x/é/n.jsonl]", ["/x/é/n.jsonl"]),
        ("[/x/a (1).txt,/y/b#2.txt]", ["/x/a (1).txt", "/y/b#2.txt"]),
        ("[ /x/a b.txt , '/y/c, d.txt' ]", ["/x/a b.txt", "/y/c, d.txt"]),
        ("[/x/a=b.txt,/y/[ab]*.txt,/z/{1}.txt]", ["/x/a=b.txt", "/y/[ab]*.txt", "/z/{1}.txt"]),
        ('["/x/a\'s.txt",/x/$y%20\\z.txt]', ["/x/a's.txt", "/x/$y%20\\z.txt"]),
        ("[/007,/null,/1e5]", ["/007", "/null", "/1e5"]),
        ("[]", []),
    ],
)
def test_lists_of_paths_are_taken_as_typed(raw, items):
    assert compose("train", [f"data.sources={raw}"], TrainSettings).data.sources == items
    assert compose("train", [f"data.heldout_sources={raw}"], TrainSettings).data.heldout_sources == items


def test_lists_of_strings_hold_overrides_and_references():
    settings = compose("train", ["logger.wandb_tags=['a=1',\"b='c,d'\",${size.name},x-${seed}]"], TrainSettings)
    assert settings.logger.wandb_tags == ["a=1", "b='c,d'", "tiny", "x-42"]


def test_sweeps_are_refused(capsys):
    @entry("train", TrainSettings)
    def main(settings: TrainSettings) -> None:
        """Do little."""

    for flag in ("-m", "--multirun"):
        assert main.run([flag, "model=efla,deltanet"]) == 2
        assert "start one command for each" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("train:\n  stpes: 3", ["train.stpes", "train.steps"]),
        ("train:\n  lr: 3", ["train.lr", "schedule.peak"]),
        ("sede: 3", ["sede", "seed"]),
        ("defaults:\n  - override /modle: efla", ["modle", "model"]),
        ("defaults:\n  - override /model: elfa", ["model=elfa", "efla"]),
        ("train: [", ["expected YAML"]),
        ("- train", ["expected keys and values"]),
        ("seed: 1\nseed: 2", ["seed"]),
        ("train:\n  steps: many", ["train.steps", "many"]),
    ],
)
def test_mistakes_in_a_recipe_name_file_key_and_the_nearest(tmp_path, lines, words):
    shutil.copytree(CONFIG_DIR, tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{lines}\n")
    with pytest.raises(UsageError) as caught:
        compose("train", ["experiment=mine"], TrainSettings, config_dir=tmp_path / "conf")
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert "mine.yaml" in message or "seed" in lines or "steps" in lines


@pytest.mark.parametrize("page", ["train.yaml", "size/tiny.yaml", "model/efla.yaml"])
def test_mistakes_in_other_pages_name_the_file(tmp_path, page):
    shutil.copytree(CONFIG_DIR, tmp_path / "conf")
    with open(tmp_path / "conf" / page, "a") as handle:
        handle.write("\nlayerz: 3\n")
    with pytest.raises(UsageError, match=rf"{page}: unknown key '.*layerz'"):
        compose("train", [], TrainSettings, config_dir=tmp_path / "conf")


def test_null_takes_back_a_recipe():
    plain = compose("train", [], TrainSettings)
    assert compose("train", ["experiment=demo", "experiment=null"], TrainSettings) == plain
    assert compose("train", ["experiment=null", "experiment=demo"], TrainSettings).train.steps == 300


def test_numbers():
    settings = compose("train", ["train.tokens=1e9", "schedule.peak=1", "train.batch_tokens=16_384"], TrainSettings)
    assert settings.train.tokens == 10**9 and isinstance(settings.train.tokens, int)
    assert settings.schedule.peak == 1.0 and isinstance(settings.schedule.peak, float)
    assert settings.train.batch_tokens == 16384


def test_one_of_two_units_replaces_the_other():
    assert compose("train", ["train.steps=10"], TrainSettings).train.tokens is None
    settings = compose("train", ["schedule.warmup_tokens=8192", "data.heldout_sources=[a.txt]"], TrainSettings)
    assert settings.schedule.warmup_updates is None
    assert settings.data.heldout_fraction is None


def test_several_trackers():
    logger = compose("train", ["logger=[wandb,tensorboard]"], TrainSettings).logger
    assert logger.wandb and logger.tensorboard


def test_later_override_wins():
    assert compose("train", ["seed=1", "seed=2", "model=efla", "model=mamba2"], TrainSettings).seed == 2


def test_paths_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "tok").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = compose(
        "train",
        [
            "runs_dir=r",
            "resume=r/a",
            "data.dir=../d",
            "data.sources=[t/*.txt,hub:a/b,builtin:pydoc]",
            "data.tokenizer=tok",
        ],
        TrainSettings,
    )
    assert settings.runs_dir == str(tmp_path / "r")
    assert settings.resume == str(tmp_path / "r/a")
    assert settings.data.dir == str(tmp_path.parent / "d")
    assert settings.data.sources == [str(tmp_path / "t/*.txt"), "hub:a/b", "builtin:pydoc"]
    assert settings.data.tokenizer == str(tmp_path / "tok")
    settings = compose("train", ["data.tokenizer=org/name"], TrainSettings)
    assert settings.data.tokenizer == "org/name"  # a hub name: nothing of that name lies here
    (tmp_path / "train").mkdir()
    settings = compose("train", ["data.tokenizer=train"], TrainSettings)
    assert (settings.data.tokenizer, settings.resume) == ("train", "auto")  # words, whatever lies here


@dataclasses.dataclass
class Small:
    where: str = key(help="a folder")
    options: dict[str, int] = key({}, "free keys")  # noqa: RUF009


@pytest.fixture
def small_config(tmp_path):
    """A folder without a page for the command: its class is enough."""
    return tmp_path


def test_missing_value_and_free_keys(small_config):
    with pytest.raises(UsageError, match=r"^where: no value given \(a folder\); add where=VALUE"):
        compose("small", [], Small, config_dir=small_config)
    settings = compose("small", ["where=x", "options.a=1"], Small, config_dir=small_config)
    assert settings.options == {"a": 1}


def test_entry_exit_codes_and_streams(small_config, capsys):
    seen = []

    @entry("small", Small, config_dir=small_config)
    def main(settings: Small) -> None:
        """Do little."""
        seen.append(settings.where)
        if settings.where == "user":
            raise UserError("where: expected\nsomething else")
        if settings.where == "file":
            Path("/nowhere/at all").read_text()
        if settings.where == "full":
            raise OSError(28, "No space left on device", "/disk/x")
        if settings.where == "read-only":
            raise OSError(30, "Read-only file system", "/disk/y")
        if settings.where == "socket":
            raise OSError(98, "Address already in use")
        if settings.where == "bug":
            raise RuntimeError("a bug")

    assert main.run(["where=ok"]) == 0
    assert main.run(["wheer=ok"], program="small.py") == 2
    assert capsys.readouterr().err == (
        "error: unknown key 'wheer': did you mean 'where'? (small.py --help lists every key)\n"
    )
    assert main.run([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main.run(["where=user"]) == 1
    assert capsys.readouterr().err == "error: where: expected something else\n"
    assert main.run(["where=file"]) == 1
    assert capsys.readouterr().err == "error: /nowhere/at all: no such file or folder\n"
    assert main.run(["where=full"]) == 1
    error = capsys.readouterr().err
    assert "/disk/x" in error and "space" in error and error.count("\n") == 1
    assert main.run(["where=read-only"]) == 1
    error = capsys.readouterr().err
    assert "error: /disk/y: read-only file system" in error and error.count("\n") == 1
    with pytest.raises(OSError, match="in use"):
        main.run(["where=socket"])
    with pytest.raises(RuntimeError, match="a bug"):
        main.run(["where=bug"])
    seen.clear()
    assert main.run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Do little." in out and "where=required" in out and "a folder" in out
    assert main.run(["--cfg", "job", "where=x"]) == 0
    assert "where: x" in capsys.readouterr().out
    assert not seen
    with mock.patch.object(sys, "argv", ["small.py", "where=ok"]), pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0


def test_rank_other_than_zero_is_quiet_about_usage(small_config, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    @entry("small", Small, config_dir=small_config)
    def main(settings: Small) -> None:
        """Do little."""

    assert main.run(["wheer=ok"]) == 2
    assert capsys.readouterr().err == ""


def test_nothing_is_created_and_the_folder_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose("train", ["experiment=demo"], TrainSettings)
    assert list(tmp_path.iterdir()) == []
