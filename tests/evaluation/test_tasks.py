"""Local task files: found by name, read whole or refused by name, path and line."""

from __future__ import annotations

import contextlib
import gzip
from pathlib import Path

import pytest

from efla_lm.errors import UserError
from efla_lm.evaluation import tasks
from efla_lm.evaluation.runner import load_tasks
from efla_lm.evaluation.tasks import MissingTask, find_file, leaf_names, load_local, manager_for, read_rows
from tests.evaluation.material import PAPER, local_file, make_tokenizer, write_rows, write_task_files


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("data"))


def test_files_are_found_by_task_and_split(tmp_path: Path) -> None:
    for name in ("wikitext2_raw_test.jsonl.gz", "piqa_validation.jsonl", "piqa_test.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    assert find_file(tmp_path, "wikitext", "test").name == "wikitext2_raw_test.jsonl.gz"
    assert find_file(tmp_path, "piqa", "validation").name == "piqa_validation.jsonl"
    with pytest.raises(MissingTask, match=rf"task sciq: no file {tmp_path}/sciq\*_test\.jsonl\[\.gz\]"):
        find_file(tmp_path, "sciq", "test")
    (tmp_path / "wikitext103_raw_test.jsonl").touch()
    with pytest.raises(MissingTask, match=r"found wikitext103_raw_test\.jsonl, wikitext2_raw_test\.jsonl\.gz"):
        find_file(tmp_path, "wikitext", "test")
    (tmp_path / "wikitext_test.jsonl").touch()
    assert find_file(tmp_path, "wikitext", "test").name == "wikitext_test.jsonl", "the exact name wins"
    with pytest.raises(MissingTask, match="does not exist"):
        find_file(tmp_path / "nowhere", "piqa", "validation")


def test_a_missing_task_is_named_and_the_others_load(data: Path, tmp_path: Path) -> None:
    for name in PAPER:
        if name not in ("piqa", "boolq"):
            source = local_file(data, name)
            (tmp_path / source.name).write_bytes(source.read_bytes())
    found, missing = load_tasks(PAPER, make_tokenizer(False), tmp_path)
    assert [next(iter(task_set.tasks)) for task_set in found] == [n for n in PAPER if n not in ("piqa", "boolq")]
    assert missing == {
        name: f"task {name}: no file {tmp_path}/{name}*_validation.jsonl[.gz]" for name in ("piqa", "boolq")
    }


def test_an_unknown_task_is_an_error_that_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    small = manager_for(["piqa"])  # the full index takes many seconds to read
    monkeypatch.setattr(tasks, "TaskManager", lambda **folders: small)
    with pytest.raises(UserError, match="has no task helaswag; the nearest name is hellaswag"):
        load_tasks(["piqa", "helaswag"], make_tokenizer(False), Path("/nowhere"))


def test_tags_stand_for_their_tasks(data: Path) -> None:
    manager = manager_for(["ai2_arc"])
    assert leaf_names(manager, "ai2_arc") == ["arc_challenge", "arc_easy"]
    loaded = load_local(manager, "ai2_arc", data)
    assert list(loaded.tasks) == ["arc_challenge", "arc_easy"]
    assert loaded.sources["arc_easy"]["documents"] == 5


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no documents"),
        (b'{"goal": "a"}\n{"goal": ', r":2 is not JSON"),
        (b'{"goal": "a"}\n[1]\n', r":2: expected the fields goal, got \[1\]"),
        (b'{"goal": "a"}\n\n{"gaol": "b"}\n', r":3: expected the fields goal, got"),
        (b'{"goal": "\xff"}\n', "UnicodeDecodeError"),
    ],
)
def test_damaged_files_are_refused_with_the_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "piqa_validation.jsonl"
    path.write_bytes(content)
    with pytest.raises(MissingTask, match=complaint):
        read_rows(path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "piqa_validation.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"goal": "a"}\n' * 100)[:-5])
    with pytest.raises(MissingTask, match="cannot be read"):
        read_rows(path)


def test_every_flipped_byte_of_a_gzip_file_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "piqa_validation.jsonl.gz"
    content = gzip.compress(b'{"goal": "a long enough text"}\n' * 5, mtime=0)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with contextlib.suppress(MissingTask):
            assert len(read_rows(path)[0]) == 5


def test_mixed_types_in_a_field_are_refused(tmp_path: Path) -> None:
    rows = [{"question": {"stem": "a"}, "answerKey": "A"}, {"question": 1, "answerKey": [2]}]
    write_rows(tmp_path / "openbookqa_test.jsonl", rows)
    with pytest.raises(MissingTask, match=r"openbookqa_test\.jsonl mixes types in one field"):
        load_local(manager_for(["openbookqa"]), "openbookqa", tmp_path)


def test_a_file_with_other_fields_does_not_fit_the_task(tmp_path: Path) -> None:
    write_rows(tmp_path / "openbookqa_test.jsonl", [{"text": "a"}])
    with pytest.raises(MissingTask, match=r"task openbookqa: .*openbookqa_test\.jsonl does not fit the task"):
        load_local(manager_for(["openbookqa"]), "openbookqa", tmp_path)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """Text may hold other separators that Python's splitlines would cut at."""
    path = tmp_path / "x_test.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_rows(path)[0] == [{"text": "a\u2028b\u0085c"}]
