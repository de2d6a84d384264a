"""Which examples of evaluation tasks a corpus contains: n-grams of words shared with its documents.

An example is touched if one n-gram of one of its texts (each string of its record is a text) occurs in a document of
the token files. Documents are decoded from their ids, so the comparison sees what training sees. Memory depends on the
tasks' n-grams, not on the corpus: about 30 bytes each in every process, and a table of 32 MiB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from efla_data.corpus.ngrams import GramSet, ngram_hashes, normalised_words
from efla_data.corpus.pool import Report, WorkerPool
from efla_data.corpus.readers import read_records
from efla_data.corpus.sources import find_files
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile, file_sha256

EXAMPLES = 20  # touched examples that a report names for each task
RUN = 64  # consecutive documents that one process scans
NOWHERE = np.iinfo(np.int64).max
Show = Callable[[int], None]  # called with the documents scanned so far, by all processes


@dataclass
class Task:
    """One file of examples. `owners` and `grams` are pairs: this example has this n-gram (an index into all)."""

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

    The report depends on the files alone, not on the number of processes. DataError names a file that cannot be read.
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
    """One task of the report. Each of its first touched examples has an n-gram and the first document with it."""
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
    """(first document that holds each n-gram, NOWHERE if none does; totals), computed by worker processes."""
    with tempfile.TemporaryDirectory() as work:
        np.save(f"{work}/grams.npy", grams)
        where = (token_file.folder, token_file.split, f"{work}/grams.npy", n)
        with WorkerPool(processes, Scanner, *where) as pool:
            left = {pool.submit(scan_share, index, processes, f"{work}/{index}.npy") for index in range(processes)}
            shares = []
            while left:
                for future in pool.finished(left):
                    left.remove(future)
                    shares.append(future.result())
                show(pool.totals[0])
        found = np.minimum.reduce([np.load(f"{work}/{index}.npy") for index in range(processes)])
    return found, {key: sum(share[key] for share in shares) for key in shares[0]}


class Scanner:
    """The state of a worker: the corpus as text, the n-grams to look for. report(documents, 0): progress."""

    def __init__(self, folder: Path, split: str, grams: str, n: int, report: Report) -> None:
        from tokenizers import Tokenizer

        self.token_file, self.n, self.report = TokenFile.open(folder, split), n, report
        self.tokenizer = Tokenizer.from_file(str(self.token_file.tokenizer_dir / "tokenizer.json"))
        self.grams = GramSet(np.load(grams))

    def words(self, number: int) -> list[str]:
        """The words of a document, without BOS and EOS."""
        ids = self.token_file.document(number)[int(self.token_file.manifest.tokenizer.add_bos) : -1]
        return normalised_words(self.tokenizer.decode(ids.tolist()))


def scan_share(scanner: Scanner, index: int, shares: int, out: str) -> dict[str, int]:
    """Scan every `shares`-th run of documents, from run `index` on. Saves the first document of each n-gram to `out`;
    returns totals. Documents rise, so the first hit stands."""
    found = np.full(len(scanner.grams.grams), NOWHERE, dtype=np.int64)
    totals = {"words": 0, "documents_touched": 0}
    documents = scanner.token_file.num_documents
    for first in range(index * RUN, documents, shares * RUN):
        run = range(first, min(first + RUN, documents))
        for number in run:
            words = scanner.words(number)
            places = scanner.grams.find(ngram_hashes(words, scanner.n))
            found[places] = np.minimum(found[places], number)
            totals["words"] += len(words)
            totals["documents_touched"] += len(places) > 0
        scanner.report(len(run), 0)
    np.save(out, found)
    return totals
