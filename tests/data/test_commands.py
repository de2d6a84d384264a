"""`scripts.prepare` and `scripts.inspect_data` as a user types them: results, one-line errors, exit codes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from efla_data.corpus.writer import ShardWriter
from efla_data.loader.token_file import TokenFile

from scripts.inspect_data import main as inspect_data
from scripts.prepare import main as prepare
from tests.data.material import jsonl, many_texts, sentencepiece_folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a corpus and a tokenizer in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_bytes(jsonl(many_texts(80)) + b"{\n")
    sentencepiece_folder(tmp_path / "tok")
    return tmp_path


LOCAL = ["data=local", "data.sources=[corpus]", "data.tokenizer=tok", "data.heldout_fraction=0.2", "processes=1"]


def test_default_corpus_needs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No golden counts: the text differs between versions of Python."""
    monkeypatch.chdir(tmp_path)
    assert prepare.run(["data=pydoc"]) == 0
    train, heldout = (TokenFile.open("data/tokens/pydoc", split, verify=True) for split in ("train", "heldout"))
    assert train.vocab_size == heldout.vocab_size == 2048
    assert train.num_tokens > 20 * 256 and heldout.num_tokens > 2 * 256
    assert train.num_documents > 5 * heldout.num_documents > 0
    assert f"{train.num_tokens:,} tokens" in capsys.readouterr().out


def test_local_corpus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.run(LOCAL) == 0
    out = capsys.readouterr().out
    train = TokenFile.open("data/tokens/local", "train", verify=True)
    assert f"{train.num_tokens:,} tokens, {train.num_documents} documents" in out
    assert "skipped bad_json 1" in out and "a.jsonl record 81: bad_json" in out
    recipe = train.manifest.recipe
    assert recipe["sources"] == [str(here / "corpus")] and recipe["tokenizer"] == str(here / "tok")
    assert prepare.run([*LOCAL, "data.dir=elsewhere", "processes=2", "data.bos=true"]) == 0
    assert TokenFile.open("elsewhere").document(0)[0] == 1


def test_errors_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.run(LOCAL) == 0
    for arguments, message in (
        (["data=local"], "data.sources is empty"),
        ([*LOCAL, "data.bos=true"], "was made with another data.bos"),
        ([*LOCAL, "data.dir=x", "data.tokenizer=./no"], "data.tokenizer: "),
        ([*LOCAL, "data.dir=x", "data.sources=[gone.jsonl]"], "gone.jsonl does not exist"),
        ([*LOCAL, "data.dir=x", "data.text_field=body"], "empty corpus: 81 records read"),
    ):
        capsys.readouterr()
        assert prepare.run(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert prepare.run([*LOCAL, "data.tokeniser=tok"]) == 2
    assert "data.tokenizer" in capsys.readouterr().err


def test_full_disk_loses_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: ShardWriter, which: int, values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.prefix))

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_write", full)
        assert prepare.run(LOCAL) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no space left" in error and "data/tokens/local.partial" in error
    assert not Path("data/tokens/local").exists()
    assert prepare.run(LOCAL) == 0
    TokenFile.open("data/tokens/local", verify=True)


def test_inspect_prints_documents_as_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "one.jsonl").write_text(
        json.dumps({"text": "the cat sat.\n\nlast é"}) + "\n" + json.dumps({"text": "x"}) + "\n"
    )
    arguments = ["data=local", "data.dir=tokens"]
    assert prepare.run([*arguments, "data.sources=[one.jsonl]", "data.tokenizer=tok", "data.heldout_fraction=0"]) == 0
    capsys.readouterr()
    assert inspect_data.run([*arguments, "data.verify=true", "count=1"]) == 0
    out = capsys.readouterr().out
    assert "hashes match" in out and "2 documents" in out and "EOS 2" in out
    assert "the cat sat.\n\nlast é</s>\n" in out
    assert inspect_data.run([*arguments, "document=-1", "ids=true"]) == 0
    ids = TokenFile.open("tokens").document(1).tolist()
    assert " ".join(map(str, ids)) in capsys.readouterr().out
    assert inspect_data.run([*arguments, "document=2"]) == 1
    assert "documents 0 to 1" in capsys.readouterr().err
    assert inspect_data.run([*arguments, "split=heldout"]) == 1
    assert "no split 'heldout'" in capsys.readouterr().err
    data = bytearray(Path("tokens/train-00000.bin").read_bytes())
    data[3] ^= 255
    Path("tokens/train-00000.bin").write_bytes(data)
    assert inspect_data.run([*arguments, "data.verify=true"]) == 1
    assert "corrupt, expected sha256" in capsys.readouterr().err
