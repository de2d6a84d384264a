"""The measurement runs, and what it compares is the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.data_speed import main as data_speed
from tests.data.material import jsonl, many_texts, sentencepiece_folder


@pytest.mark.timeout(180)
def test_both_ways_make_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.jsonl").write_bytes(jsonl(many_texts(2000)))
    sentencepiece_folder(tmp_path / "tok")
    arguments = ["data=local", "data.sources=[a.jsonl]", "data.tokenizer=tok", "data.context=64", "seconds=0.2"]
    assert data_speed.run(arguments) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "results" / "data_speed.json").read_text())
    assert report["prepare"]["tokens"] == report["datasets_map"]["tokens"] > 50_000
    assert report["ratio"] > 0 and report["loader"]["readers"] == 2 and report["loader"]["tokens_per_second"] > 1e6
    assert report["seek_seconds"] < 1
    assert "M per processor second" in out and "by 2 processes" in out
    (tmp_path / "b.txt").write_text("text")
    assert data_speed.run([*arguments, "data.sources=[b.txt]"]) == 1
    assert "expected files of JSON lines, or of parquet" in capsys.readouterr().err
