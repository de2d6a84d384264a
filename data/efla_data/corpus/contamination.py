"""Which examples of evaluation tasks stand in a corpus: overlap of n-grams of words with the training documents.

An example counts as touched if one n-gram of one of its texts (every string of its record is a text by itself) occurs
in a document of the token files. Documents are turned back into text, so what is compared is what training sees.
Memory is that of the tasks' n-grams, whatever the corpus: about 30 bytes each for every process, and a table of 32 MiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from efla_data.corpus.ngrams import GramSet, ngram_hashes, normalised_words
from efla_data.corpus.readers import read_records
from efla_data.corpus.sources import find_files
from efla_data.corpus.workers import worker_environment
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile, file_sha256

EXAMPLES = 20  # touched examples that a report names for each task
RUN = 64  # documents in a row that one process scans
REPORT_DOCUMENTS = 256
NOWHERE = np.iinfo(np.int64).max
Show = Callable[[int], None]  # documents scanned so far, by all processes


@dataclass
class Task:
    """One file of examples. `owners` and `grams` are pairs: this example has this n-gram (place in the set of all)."""

    path: Path
    examples: int = 0
    checked: int = 0  # those with a text of n words
    owners: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    grams: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def contamination_report(
    folder: str | Path,
    tasks: list[str],
    n: int = 13,
    split: str = "train",
    processes: int = 1,
    show: Show | None = None,
) -> dict[str, Any]:
    """Scan the documents of a split for the n-grams of task files (files, folders, globs; JSON lines, parquet, text).

    The report depends on the files alone, not on the number of processes. DataError for what cannot be read.
    """
    if n < 1:
        raise DataError(f"n: expected at least 1 word, got {n}")
    files = [Path(path) for source in tasks for path in find_files(source, "tasks")]
    if not files:
        raise DataError("tasks is empty: give the files or folders of evaluation examples")
    token_file = TokenFile.open(folder, split)
    loaded, grams = _load_tasks(files, n)
    found, totals = _scan(token_file, grams, n, processes, show or (lambda _: None))
    return {
        "corpus": {
            "folder": str(token_file.folder),
            "split": split,
            "fingerprint": token_file.fingerprint,
            "documents": token_file.num_documents,
            "tokens": token_file.num_tokens,
            **totals,
        },
        "n": n,
        "ngrams": len(grams),
        "ngrams_found": int((found < NOWHERE).sum()),
        "tasks": [_describe(task, grams, found, n) for task in loaded],
    }


def _load_tasks(files: list[Path], n: int) -> tuple[list[Task], np.ndarray]:
    """Tasks, and the distinct n-grams of all of them, sorted, uint64."""
    tasks, hashes = [], []
    for path in files:
        task, owners = Task(path), []
        for number, texts in enumerate(read_records(path)):
            own = np.unique(np.concatenate([np.empty(0, np.uint64), *(_hashes_of(text, n) for text in texts)]))
            task.examples, task.checked = number + 1, task.checked + (len(own) > 0)
            owners.append(np.full(len(own), number))
            hashes.append(own)
        task.owners = np.concatenate([np.empty(0, np.int64), *owners])
        tasks.append(task)
    everything = np.concatenate([np.empty(0, np.uint64), *hashes])
    grams, places = np.unique(everything, return_inverse=True)
    first = 0
    for task in tasks:
        task.grams = places[first : first + len(task.owners)]
        first += len(task.owners)
    return tasks, grams


def _hashes_of(text: str, n: int) -> np.ndarray:
    return ngram_hashes(normalised_words(text), n)


def _describe(task: Task, grams: np.ndarray, found: np.ndarray, n: int) -> dict[str, Any]:
    """One line of the report; its first touched examples, each with an n-gram and the first document that has it."""
    hit = found[task.grams] < NOWHERE
    touched = np.unique(task.owners[hit])
    own, own_hit = (np.bincount(task.owners[which], minlength=task.examples) for which in (slice(None), hit))
    wanted = set(touched[:EXAMPLES].tolist())
    first = []
    for number, texts in enumerate(read_records(task.path)):
        if number in wanted:
            words, document = _first_match(texts, grams, found, n)
            counts = {"ngrams": int(own[number]), "found": int(own_hit[number])}
            first.append({"record": number + 1, **counts, "words": words, "document": document})
        if len(first) == len(wanted):
            break
    return {
        "file": str(task.path),
        "sha256": file_sha256(task.path),
        "examples": task.examples,
        "too_short": task.examples - task.checked,
        "touched": len(touched),
        "share": len(touched) / task.checked if task.checked else 0.0,
        "first": first,
    }


def _first_match(texts: list[str], grams: np.ndarray, found: np.ndarray, n: int) -> tuple[str, int]:
    for text in texts:
        words = normalised_words(text)
        documents = found[np.searchsorted(grams, ngram_hashes(words, n))]
        for i in np.flatnonzero(documents < NOWHERE)[:1].tolist():
            return " ".join(words[i : i + n]), int(documents[i])
    raise AssertionError("no n-gram of a touched example is in the corpus")


def _scan(
    token_file: TokenFile, grams: np.ndarray, n: int, processes: int, show: Show
) -> tuple[np.ndarray, dict[str, int]]:
    """(first document that holds each n-gram, NOWHERE if none does; totals), by processes of their own."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        np.save(work / "grams.npy", grams)
        job = {"folder": str(token_file.folder), "split": token_file.split, "n": n, "processes": processes}
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        done = [0] * processes

        def follow(index: int, process: subprocess.Popen[str]) -> None:
            assert process.stdout is not None
            for line in process.stdout:
                done[index] = int(line)
                show(sum(done))

        workers = [_start(work, index) for index in range(processes)]
        threads = [threading.Thread(target=follow, args=pair, daemon=True) for pair in enumerate(workers)]
        try:
            for thread in threads:
                thread.start()
            codes = [worker.wait() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if any(codes):
            raise DataError(f"a process that scans the corpus ended with exit code {max(codes, key=abs)}: see above")
        found = np.minimum.reduce([np.load(work / f"found-{index}.npy") for index in range(processes)])
        counts = [json.loads((work / f"totals-{index}.json").read_text()) for index in range(processes)]
    return found, {key: sum(count[key] for count in counts) for key in counts[0]}


def _start(work: Path, index: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "efla_data.corpus.contamination", str(work), str(index)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=worker_environment())


def main() -> None:
    """A worker's side: `python -m efla_data.corpus.contamination WORK INDEX` scans its share of the documents."""
    from tokenizers import Tokenizer

    work, index = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((work / "job.json").read_text(encoding="utf-8"))
    token_file = TokenFile.open(job["folder"], job["split"])
    tokenizer = Tokenizer.from_file(str(token_file.tokenizer_dir / "tokenizer.json"))
    opening = int(token_file.manifest.tokenizer.add_bos)
    grams = GramSet(np.load(work / "grams.npy"))
    found = np.full(len(grams.grams), NOWHERE, dtype=np.int64)
    totals = {"words": 0, "documents_touched": 0}
    done = 0
    for number in _share(token_file.num_documents, index, job["processes"]):
        ids = token_file.document(number)[opening:-1]
        words = normalised_words(tokenizer.decode(ids.tolist()))
        places = grams.find(ngram_hashes(words, job["n"]))
        found[places] = np.minimum(found[places], number)
        totals["words"] += len(words)
        totals["documents_touched"] += len(places) > 0
        done += 1
        if done % REPORT_DOCUMENTS == 0:
            print(done, flush=True)
    np.save(work / f"found-{index}.npy", found)
    (work / f"totals-{index}.json").write_text(json.dumps(totals), encoding="utf-8")
    print(done, flush=True)


def _share(documents: int, index: int, processes: int) -> Iterator[int]:
    """Every so-manieth run of documents."""
    for first in range(index * RUN, documents, processes * RUN):
        yield from range(first, min(first + RUN, documents))


if __name__ == "__main__":
    main()
