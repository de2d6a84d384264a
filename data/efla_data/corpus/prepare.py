"""Text to token files: plan chunks, tokenise them, concatenate, rename.

    OUT.partial/plan.json            the recipe, and the chunks with sizes and times of their files
    OUT.partial/tokenizer/           the tokenizer, and tokenizer_info.json
    OUT.partial/chunks/000000.*       token files of each finished chunk
    OUT.partial/files/               the result while it is written
    OUT/                             the result

The same sources, tokenizer and recipe give the same bytes for any number of processes. After a kill, the next run of
the same plan continues from the finished chunks in OUT.partial; a run of another plan starts anew.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from efla_data.atomic import write_atomically
from efla_data.corpus.assemble import assemble
from efla_data.corpus.chunk import is_held_out
from efla_data.corpus.manifest import FILE_NAME, Manifest, TokenizerInfo, load_manifest
from efla_data.corpus.progress import Progress
from efla_data.corpus.readers import Tally, pydoc_topics, read_documents
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.sources import Piece, plan_chunks
from efla_data.corpus.tokenise import INFO, TOKENIZER, WORKERS_LOCK, tokenise
from efla_data.corpus.tokenizer import (
    LoadedTokenizer,
    describe_tokenizer,
    find_tokenizer,
    save_tokenizer,
    tokenizer_sha256,
    train_tokenizer,
)
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile, file_sha256

PLAN_VERSION = 3  # of the files in OUT.partial
LOCK, PLAN = "lock", "plan.json"
WORKERS_WAIT = 60.0  # seconds
TRAINING_BYTES = 1 << 28  # text from the beginning of the corpus that a tokenizer is trained on, at most


def prepare(
    recipe: Recipe,
    out_dir: str | os.PathLike[str],
    processes: int | None = None,
    overwrite: bool = False,
    show: Callable[[Progress], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Manifest:
    """Make the token files of `recipe` in `out_dir`; return at once if they exist already.

    processes: workers; None takes all cores that this process may use. overwrite: replace token files of another
    recipe. show: called about once a second. tell: called with a line on each folder that has files of other kinds.
    DataError for unusable sources, tokenizers or settings, for token files of another recipe in `out_dir`, and when
    another process is preparing the same folder.
    """
    recipe.check()
    if not recipe.sources:
        raise DataError("data.sources is empty: give files, globs, folders, hub:NAME or builtin:pydoc")
    out = Path(out_dir).resolve()  # follow a link to another disk; the link itself stays
    existing = None if overwrite else _existing(out, recipe)
    if existing is not None:
        return existing
    chunks = plan_chunks(recipe, tell)
    _refuse_foreign(out)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial), _full_disk_named(partial):
        _keep_plan(partial, recipe, chunks)
        info = _keep_tokenizer(partial, recipe, chunks)
        results, selection = tokenise(partial, recipe, chunks, processes or available_cores(), show)
        files = partial / "files"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        manifest = assemble(partial, files, recipe, chunks, results, info, selection)
        (files / TOKENIZER).mkdir()
        for path in (partial / TOKENIZER).iterdir():
            shutil.copy2(path, files / TOKENIZER)
        _replace(files, out)
        shutil.rmtree(partial)
    return manifest


def available_cores() -> int:
    """Cores that this process may run on (a container or `taskset` may allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _existing(out: Path, recipe: Recipe) -> Manifest | None:
    """The manifest of `out` if this recipe made it; None if there is none; DataError if another one did.

    Local sources are compared by size and time, then hash. Hub data sets are not looked up: no network is needed.
    """
    if not (out / FILE_NAME).is_file():
        return None
    advice = "set overwrite=true to replace it, or another data.dir"
    manifest = load_manifest(out)
    defaults = Recipe([]).to_dict()  # for keys that older manifests do not have
    for key, value in recipe.to_dict().items():
        was = manifest.recipe.get(key, defaults[key])
        if was != value:
            raise DataError(
                f"{out} was made with another data.{key.removeprefix('hub_')}: {was!r}, now {value!r}; {advice}"
            )
    if not any(source.startswith("hub:") for source in recipe.sources + (recipe.heldout_sources or [])):
        _compare_sources(manifest, _files(plan_chunks(recipe)), f"{out} was made", advice)
    local = Path(recipe.tokenizer).exists()
    if local and tokenizer_sha256(find_tokenizer(recipe.tokenizer)) != manifest.tokenizer.sha256:
        raise DataError(f"{out} was made before tokenizer {recipe.tokenizer} changed; {advice}")
    for split in manifest.splits:
        TokenFile.open(out, split)
    return manifest


def _compare_sources(
    manifest: Manifest, files: dict[tuple[str, bool], tuple[int, int]], what: str, advice: str
) -> None:
    old = {(line["path"], line["heldout"]): line for line in manifest.sources}
    if changed := sorted(path for path, _ in old.keys() ^ files.keys()):
        raise DataError(f"{what} from other sources ({changed[0]} came or went); {advice}")
    for source, (size, mtime_ns) in files.items():
        if not _unchanged(old[source], size, mtime_ns):
            raise DataError(f"{what} before {source[0]} changed; {advice}")


def _files(chunks: list[list[Piece]]) -> dict[tuple[str, bool], tuple[int, int]]:
    """(path, held out) -> (bytes, time of change) of every source."""
    files: dict[tuple[str, bool], tuple[int, int]] = {}
    for piece in (piece for chunk in chunks for piece in chunk):
        size, _ = files.get((piece.path, piece.heldout), (0, 0))
        files[piece.path, piece.heldout] = (size + piece.bytes, piece.mtime_ns)
    return files


def _unchanged(line: dict[str, Any], size: int, mtime_ns: int) -> bool:
    """Whether a source is unchanged: same size, and same time or (for a copy) same hash."""
    if line["path"].startswith("builtin:"):
        return line["sha256"] == hashlib.sha256("\0".join(pydoc_topics()).encode()).hexdigest()
    if line["bytes"] != size:
        return False
    return line["mtime_ns"] == mtime_ns or line["sha256"] is None or line["sha256"] == file_sha256(line["path"])


def _refuse_foreign(out: Path) -> None:
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FILE_NAME).is_file())):
        raise DataError(f"data.dir: {out} exists and holds no token files; name a new folder")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Allow one `prepare` at a time per folder. The lock ends with the process.

    Wait for workers of an earlier run that is already dead: they would write to the same chunks.
    """
    with open(partial / LOCK, "w") as handle, open(partial / WORKERS_LOCK, "w") as workers:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _wait_for_lock(workers)
        except BlockingIOError as error:
            raise DataError(f"another process is preparing {partial}; wait for it or name another data.dir") from error
        fcntl.flock(workers, fcntl.LOCK_UN)
        yield


def _wait_for_lock(handle: IO[str]) -> None:
    """Wait until the workers of a killed run have ended. BlockingIOError if they do not."""
    until = time.monotonic() + WORKERS_WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


@contextmanager
def _full_disk_named(partial: Path) -> Iterator[None]:
    """Turn a full disk into a DataError that names the folder and says how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space left on the disk of {partial}, which holds the token files twice for a while; free "
            "some, or name a data.dir with more, and run the command again: it continues from the finished parts"
        ) from error


def _keep_plan(partial: Path, recipe: Recipe, chunks: list[list[Piece]]) -> None:
    """Keep what an earlier run of the same plan left, or clear the folder."""
    plan = {
        "version": PLAN_VERSION,
        "recipe": recipe.to_dict(),
        "tokenizer": tokenizer_sha256(find_tokenizer(recipe.tokenizer)) if recipe.tokenizer != "train" else None,
        "chunks": [[dataclasses.asdict(piece) for piece in chunk] for chunk in chunks],
    }
    content = json.dumps(plan)
    path = partial / PLAN
    if not path.is_file() and any(item.name not in (LOCK, WORKERS_LOCK) for item in partial.iterdir()):
        raise DataError(f"{partial} exists and was not left by an earlier run; remove it or name another data.dir")
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        for item in partial.iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            elif item.name not in (LOCK, WORKERS_LOCK):
                item.unlink()
        write_atomically(path, content)
    (partial / "chunks").mkdir(exist_ok=True)
    for item in (partial / "chunks").iterdir():
        if item.name.split(".")[1].isdigit():  # NUMBER.PROCESS.*: a killed worker was writing it
            item.unlink()


def _keep_tokenizer(partial: Path, recipe: Recipe, chunks: list[list[Piece]]) -> TokenizerInfo:
    """The tokenizer in OUT.partial: from an earlier run, else loaded or trained now."""
    if (partial / INFO).is_file():
        return TokenizerInfo(**json.loads((partial / INFO).read_text(encoding="utf-8")))
    if recipe.tokenizer == "train":
        tokenizer: LoadedTokenizer = train_tokenizer(_training_texts(recipe, chunks), recipe.vocab_size)
    else:
        tokenizer = find_tokenizer(recipe.tokenizer)
    info = describe_tokenizer(tokenizer, recipe.bos)
    save_tokenizer(tokenizer, partial / TOKENIZER, info.add_bos)
    write_atomically(partial / INFO, json.dumps(dataclasses.asdict(info)))
    return info


def _training_texts(recipe: Recipe, chunks: list[list[Piece]]) -> Iterator[str]:
    """The first TRAINING_BYTES of training documents, without held-out ones."""
    size = 0
    for piece in (piece for chunk in chunks for piece in chunk if not piece.heldout):
        for text, encoded in read_documents(piece, recipe.text_field, Tally()):
            if not is_held_out(encoded, recipe):
                yield text
                size += len(encoded)
            if size >= TRAINING_BYTES:
                return


def _replace(files: Path, out: Path) -> None:
    """Rename the finished folder to `out`, then remove the folder that had this name."""
    old = out.with_name(f"{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists() and any(out.iterdir()):
        os.rename(out, old)
    os.rename(files, out)
    shutil.rmtree(old, ignore_errors=True)
