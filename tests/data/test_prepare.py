"""From text to token files: the same bytes every time, by any number of processes, after any interruption."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from efla_data import sources, workers
from efla_data.errors import DataError
from efla_data.manifest import Manifest
from efla_data.prepare import prepare
from efla_data.progress import Progress, Watcher
from efla_data.recipe import Recipe
from efla_data.token_file import TokenFile

from tests.data.material import jsonl, load, many_texts, sentencepiece_folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Four files of different kinds in several units, with a tokenizer."""
    monkeypatch.setattr(sources, "SMALLEST_UNIT", 4000)
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.jsonl").write_bytes(jsonl(many_texts(60, seed=n)) + b"{broken\n")
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(jsonl(many_texts(60, seed=3))))
    tokenizer = sentencepiece_folder(tmp_path / "tokenizer")
    return Recipe([str(folder)], tokenizer=str(tokenizer), heldout_fraction=0.2)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fingerprints(manifest: Manifest) -> dict[str, str]:
    return {name: split.fingerprint for name, split in manifest.splits.items()}


def documents(folder: Path, split: str) -> list[str]:
    file = TokenFile.open(folder, split, verify=True)
    tokenizer = load(file.tokenizer_dir)
    return [tokenizer.decode(file.document(n).tolist()) for n in range(file.num_documents)]


@pytest.mark.timeout(120)
def test_same_bytes_on_repeat_and_for_one_and_two_processes(corpus: Recipe, tmp_path: Path) -> None:
    first = prepare(corpus, tmp_path / "one", processes=1)
    assert len(sources.plan_units(corpus)) >= 4
    prepare(corpus, tmp_path / "again", processes=1)
    two = prepare(corpus, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "again") == contents(tmp_path / "two")
    assert fingerprints(first) == fingerprints(two)
    assert not list(tmp_path.glob("*.partial"))


def test_documents_keep_their_order_and_the_split_is_by_document(corpus: Recipe, tmp_path: Path) -> None:
    manifest = prepare(corpus, tmp_path / "out", processes=1)
    train, heldout = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "heldout")
    texts = [text for n in range(4) for text in many_texts(60, seed=n)]
    assert [text for text in texts if text in set(train)] == train
    assert [text for text in texts if text in set(heldout)] == heldout
    assert sorted(train + heldout) == sorted(texts)
    assert 0.1 < len(heldout) / len(texts) < 0.3
    assert manifest.skipped == {"bad_json": 3}
    assert [(Path(e["file"]).name, e["record"]) for e in manifest.skipped_examples] == [
        (f"{n}.jsonl", 61) for n in range(3)
    ]
    assert manifest.splits["train"].text_bytes == sum(len(text.encode()) for text in train)


def test_held_out_choice_follows_text_and_seed_not_place(corpus: Recipe, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "a", processes=1)
    folder = Path(corpus.sources[0])
    reverse = Recipe(
        **{**corpus.to_dict(), "sources": [str(folder / f"{n}.jsonl{'.gz' * (n == 3)}") for n in (3, 2, 1, 0)]}
    )
    prepare(reverse, tmp_path / "b", processes=1)
    assert sorted(documents(tmp_path / "a", "heldout")) == sorted(documents(tmp_path / "b", "heldout"))
    prepare(Recipe(**{**corpus.to_dict(), "split_seed": 7}), tmp_path / "c", processes=1)
    assert set(documents(tmp_path / "a", "heldout")) != set(documents(tmp_path / "c", "heldout"))


def test_held_out_sources(corpus: Recipe, tmp_path: Path) -> None:
    held = str(Path(corpus.sources[0]) / "1.jsonl")
    recipe = Recipe(**{**corpus.to_dict(), "heldout_fraction": None, "heldout_sources": [held]})
    prepare(recipe, tmp_path / "out", processes=1)
    assert documents(tmp_path / "out", "heldout") == many_texts(60, seed=1)
    assert documents(tmp_path / "out", "train") == [text for n in (0, 2, 3) for text in many_texts(60, seed=n)]


def test_trained_tokenizer_never_sees_held_out_text(tmp_path: Path) -> None:
    """A word that only the held-out file has gets no merge of its own."""
    (tmp_path / "train.jsonl").write_bytes(jsonl(many_texts(50)))
    (tmp_path / "heldout.jsonl").write_bytes(jsonl(["zyzzyva " * 500]))
    recipe = Recipe([str(tmp_path / "train.jsonl")], vocab_size=300, heldout_sources=[str(tmp_path / "heldout.jsonl")])
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    assert 258 < manifest.tokenizer.vocab_size <= 300
    vocabulary = load(tmp_path / "out" / "tokenizer").get_vocab()
    assert not any("zy" in entry for entry in vocabulary)
    assert documents(tmp_path / "out", "heldout") == ["zyzzyva " * 500]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("budget", [1, 1000, 2500, 10**9])
def test_token_budget_ends_at_a_document_whoever_is_faster(corpus: Recipe, tmp_path: Path, budget: int) -> None:
    whole = prepare(corpus, tmp_path / "whole", processes=1)
    recipe = Recipe(**{**corpus.to_dict(), "max_tokens": budget, "heldout_fraction": None})
    one = prepare(recipe, tmp_path / "one", processes=1)
    two = prepare(recipe, tmp_path / "two", processes=2)
    assert fingerprints(one) == fingerprints(two)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    train = TokenFile.open(tmp_path / "one", "train", verify=True)
    texts = [text for n in range(4) for text in many_texts(60, seed=n)]
    assert documents(tmp_path / "one", "train") == texts[: train.num_documents]
    if budget < whole.splits["train"].tokens:
        last = len(train.document(train.num_documents - 1))
        assert train.num_tokens - last < budget <= train.num_tokens
    else:
        assert train.num_documents == len(texts)


def test_second_call_returns_at_once_and_other_recipes_are_refused(corpus: Recipe, tmp_path: Path) -> None:
    manifest = prepare(corpus, tmp_path / "out", processes=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert prepare(corpus, tmp_path / "out") == manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(DataError, match=r"another data\.bos: False, now True; set overwrite=true"):
        prepare(Recipe(**{**corpus.to_dict(), "bos": True}), tmp_path / "out")
    source = Path(corpus.sources[0]) / "2.jsonl"
    os.utime(source, ns=(1, 1))  # another time, the same content: a copy
    assert prepare(corpus, tmp_path / "out") == manifest
    source.write_bytes(source.read_bytes().replace(b"cat", b"dog"))
    with pytest.raises(DataError, match=r"before .*2\.jsonl changed"):
        prepare(corpus, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before  # nothing lost
    changed = prepare(corpus, tmp_path / "out", processes=1, overwrite=True)
    assert fingerprints(changed) != fingerprints(manifest)
    source.unlink()
    with pytest.raises(DataError, match=r"2\.jsonl came or went"):
        prepare(corpus, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text", "tokenizer"]


def test_changed_tokenizer_is_noticed(corpus: Recipe, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", processes=1)
    sentencepiece_folder(Path(corpus.tokenizer), template=False)
    with pytest.raises(DataError, match=r"before tokenizer .* changed"):
        prepare(corpus, tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="holds no token files"):
            prepare(corpus, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def run_killed_after(recipe: Recipe, out: Path, units: int, unit_bytes: int) -> None:
    """`prepare` with 2 processes in a process of its own, killed when so many units are finished."""
    code = (
        "import json, sys\n"
        "from efla_data import sources\n"
        "from efla_data.prepare import prepare\n"
        "from efla_data.recipe import Recipe\n"
        f"sources.SMALLEST_UNIT = {unit_bytes}\n"
        f"prepare(Recipe(**json.loads(sys.argv[1])), sys.argv[2], processes=2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(recipe.to_dict()), str(out)])
    try:
        partial = out.with_name(out.name + ".partial")
        deadline = time.monotonic() + 60
        while len(list((partial / "units").glob("??????.json"))) < units:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(180)
def test_killed_run_goes_on_where_it_was(corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_UNIT", 20_000)
    folder = Path(corpus.sources[0])
    for n in range(8):
        (folder / f"more{n}.jsonl").write_bytes(jsonl(many_texts(2000, seed=10 + n)))
    run_killed_after(corpus, tmp_path / "out", 3, sources.SMALLEST_UNIT)
    assert not (tmp_path / "out").exists()
    finished = sorted((tmp_path / "out.partial" / "units").glob("??????.json"))
    times = {path: path.stat().st_mtime_ns for path in finished}
    assert 3 <= len(finished) < len(sources.plan_units(corpus))
    seen: list[Progress] = []
    renewed: list[Path] = []

    def show(progress: Progress) -> None:
        seen.append(progress)
        renewed.extend(path for path, then in times.items() if path.stat().st_mtime_ns != then)

    resumed = prepare(corpus, tmp_path / "out", processes=1, show=show)
    assert not renewed
    assert not (tmp_path / "out.partial").exists()
    assert seen[-1].units <= len(sources.plan_units(corpus)) - len(finished)
    assert seen[-1].fraction == 1
    straight = prepare(corpus, tmp_path / "straight", processes=1)
    assert fingerprints(resumed) == fingerprints(straight)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_what_another_plan_left_is_not_used(corpus: Recipe, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "units").mkdir(parents=True)
    (partial / "plan.json").write_text("{}")
    (partial / "tokenizer_info.json").write_text("{}")
    (partial / "units" / "000000.json").write_text("{}")
    assert fingerprints(prepare(corpus, tmp_path / "out", processes=1)) == fingerprints(
        prepare(corpus, tmp_path / "clean", processes=1)
    )


def test_a_partial_folder_of_something_else_is_left_alone(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("half of it")
    with pytest.raises(DataError, match="was not left by an earlier run"):
        prepare(corpus, tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "half of it"


def test_half_written_units_are_removed(corpus: Recipe, tmp_path: Path) -> None:
    """A unit counts when its JSON is there, and what a killed worker was writing does not stay on the disk."""
    broken = Recipe(**{**corpus.to_dict(), "sources": [*corpus.sources, str(tmp_path / "bad.jsonl.gz")]})
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(jsonl(many_texts(200, seed=9)))[:-9])
    for _ in range(2):
        with pytest.raises(DataError, match="truncated"):
            prepare(broken, tmp_path / "out", processes=1)
    left = [path.name.split(".")[1] for path in (tmp_path / "out.partial" / "units").iterdir()]
    assert sum(name.isdigit() for name in left) == 4  # of the last attempt: two files for each of two splits


def test_links_to_another_disk_are_followed(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "tokens").symlink_to(tmp_path / "big disk" / "tokens")
    (tmp_path / "big disk" / "tokens").mkdir()
    prepare(corpus, tmp_path / "tokens", processes=1)
    assert (tmp_path / "tokens").is_symlink()
    TokenFile.open(tmp_path / "big disk" / "tokens", verify=True)


def test_two_at_once_in_one_folder_are_refused(corpus: Recipe, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(corpus, tmp_path / "out")
    prepare(corpus, tmp_path / "out", processes=1)


@pytest.mark.timeout(120)
def test_error_in_a_worker_names_its_file_and_keeps_what_is_finished(corpus: Recipe, tmp_path: Path) -> None:
    path = Path(corpus.sources[0]) / "3.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    for processes in (1, 2):
        with pytest.raises(DataError, match=r"3\.jsonl\.gz: truncated or damaged gz file"):
            prepare(corpus, tmp_path / "out", processes=processes)
        assert not (tmp_path / "out").exists()
        assert list((tmp_path / "out.partial" / "units").glob("*.json"))


@pytest.mark.timeout(120)
def test_death_of_a_worker_is_told(corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = workers.Worker.__init__

    def start_and_die(self: workers.Worker, folder: Path) -> None:
        start(self, folder)
        self.process.kill()

    monkeypatch.setattr(workers.Worker, "__init__", start_and_die)
    with pytest.raises(DataError, match=r"a worker ended with exit code -9 \(killed, perhaps for want of memory"):
        prepare(corpus, tmp_path / "out", processes=2)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "empty corpus: 0 records read"),
        ([{"text": ""}, {"text": " "}], {}, "empty corpus: 2 records read, 0 documents usable, skipped: empty 2"),
        (
            [{"body": "x"}],
            {},
            r"missing_field 1 \(first: .*text\.jsonl record 1, missing_field\); data.text_field is 'text'",
        ),
        ([{"text": "a"}], {"heldout_fraction": 1e-9}, "no held-out document: 1 records read.*raise it"),
        ([{"text": "a"}], {"heldout_fraction": 1 - 1e-9}, "no training document.*lower data.heldout_fraction"),
    ],
)
def test_nothing_to_train_on(
    tmp_path: Path, lines: list[dict[str, str]], options: dict[str, float], message: str
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=message):
        prepare(Recipe([str(tmp_path / "text.jsonl")], **options), tmp_path / "out", processes=1)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_recipes_that_cannot_be_meant(tmp_path: Path) -> None:
    for options, message in (
        ({"sources": []}, r"data\.sources is empty"),
        ({"sources": ["x"], "heldout_fraction": 1.0}, "expected 0 <= fraction < 1, got 1.0"),
        ({"sources": ["x"], "heldout_fraction": 0.1, "heldout_sources": ["y"]}, "exclude each other"),
        ({"sources": ["x"], "max_tokens": 0}, "expected at least 1 or null, got 0"),
        ({"sources": ["x"], "vocab_size": 257}, "expected 258"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(Recipe(**options), tmp_path / "out")  # type: ignore[arg-type]


def test_manifest_records_where_everything_came_from(corpus: Recipe, tmp_path: Path) -> None:
    import hashlib

    manifest = prepare(corpus, tmp_path / "out", processes=1)
    folder = Path(corpus.sources[0])
    assert [source["path"] for source in manifest.sources] == [str(path) for path in sorted(folder.iterdir())]
    for source in manifest.sources:
        data = Path(source["path"]).read_bytes()
        assert source["sha256"] == hashlib.sha256(data).hexdigest()
        assert source["bytes"] == len(data)
        assert source["documents"] == 60
    assert manifest.recipe == corpus.to_dict()
    kept = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()
    assert manifest.tokenizer.sha256 == hashlib.sha256(kept).hexdigest()
    assert set(manifest.versions) == {"python", "efla-lm", "tokenizers", "numpy"}


def test_progress_estimates() -> None:
    """Half of the text read is about half of the time, before any large unit ends and after a resume."""
    seen: list[Progress] = []
    watcher = Watcher([10, 90, 100, 500], None, seen.append, interval=0)
    watcher.skip(3, 1)
    watcher.report(20, 5)
    assert seen[-1].fraction == 0 and seen[-1].seconds_left is None
    watcher.finish(0, 20)  # 2 bytes of text per byte on disk: 400 in all
    watcher.report(180, 45)
    assert seen[-1].fraction == pytest.approx(0.5)
    assert (seen[-1].units_done, seen[-1].units, seen[-1].text_bytes, seen[-1].tokens) == (1, 3, 200, 50)
    watcher.report(10_000, 1)
    assert seen[-1].fraction == 0.99  # an estimate never claims to be the end
    watcher.finish(1, 180)
    watcher.finish(2, 10_000)
    assert seen[-1].fraction == 1 and seen[-1].seconds_left == 0
    budget = Watcher([1000, 1000], 100, seen.append, interval=0)
    budget.report(500, 25)
    assert seen[-1].fraction == pytest.approx(0.25)
