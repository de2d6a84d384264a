"""Duplicates, samples and shards: what stays depends on the texts alone, whoever works, however often it is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus import assemble, selection, sources, tokenise
from efla_data.corpus.chunk import document_hash, is_held_out
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile

from tests.data.material import contents, documents, fingerprints, jsonl, many_texts
from tests.data.test_restart import run_killed_after


def changed(recipe: Recipe, **changes: object) -> Recipe:
    return Recipe.from_dict({**recipe.to_dict(), **changes})  # type: ignore[arg-type]


@pytest.fixture
def repeated(corpus: Recipe) -> tuple[Recipe, list[str]]:
    """The shared corpus with texts repeated within a file and across files: (recipe, all texts in reading order)."""
    folder = Path(corpus.sources[0])
    texts = [text for n in range(4) for text in many_texts(60, seed=n)]
    more = [*texts[10:40], "the cat\n", "the cat", "the cat\n", *texts[200:230], *texts[10:20]]
    (folder / "4.jsonl").write_bytes(jsonl(more))
    return changed(corpus, deduplicate=True), texts + more


def distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bucket", [1 << 20, 50])
def test_the_first_of_equal_texts_stays(
    repeated: tuple[Recipe, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    monkeypatch.setattr(selection, "BUCKET", bucket)  # small: several files of hashes
    recipe, texts = repeated
    manifest = prepare(recipe, tmp_path / "one", processes=1)
    train, heldout = documents(tmp_path / "one", "train"), documents(tmp_path / "one", "heldout")
    held = [text for text in distinct(texts) if is_held_out(text.encode(), recipe)]
    assert heldout == held
    assert train == [text for text in distinct(texts) if text not in set(held)]
    assert manifest.skipped == {"bad_json": 3, "duplicate": len(texts) - len(distinct(texts))}
    assert manifest.splits["train"].text_bytes == sum(len(text.encode()) for text in train)
    assert fingerprints(prepare(recipe, tmp_path / "two", processes=2)) == fingerprints(manifest)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    kept = prepare(changed(recipe, deduplicate=False), tmp_path / "all", processes=1)
    assert kept.splits["train"].documents + kept.splits["heldout"].documents == len(texts)
    TokenFile.open(tmp_path / "one", verify=True)


def test_held_out_text_is_not_trained_on(repeated: tuple[Recipe, list[str]], tmp_path: Path) -> None:
    """A file of held-out text comes before all others: what training repeats of it goes, and is counted."""
    recipe, texts = repeated
    held = str(Path(recipe.sources[0]) / "4.jsonl")
    recipe = changed(recipe, heldout_fraction=None, heldout_sources=[held])
    prepare(recipe, tmp_path / "out", processes=1)
    heldout = documents(tmp_path / "out", "heldout")
    assert heldout == distinct(texts[240:])
    assert documents(tmp_path / "out", "train") == [text for text in texts[:240] if text not in set(heldout)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("budget", [1, 900, 4000, 10**9])
def test_budget_counts_distinct_documents(repeated: tuple[Recipe, list[str]], tmp_path: Path, budget: int) -> None:
    """The whole corpus twice: the second half adds nothing to the budget."""
    recipe, texts = repeated
    folder = Path(recipe.sources[0])
    (folder / "0-again.jsonl").write_bytes((folder / "0.jsonl").read_bytes() * 3)
    texts = texts[:60] * 4 + texts[60:]
    recipe = changed(recipe, heldout_fraction=None, max_tokens=budget)
    one = prepare(recipe, tmp_path / "one", processes=1)
    assert fingerprints(prepare(recipe, tmp_path / "two", processes=2)) == fingerprints(one)
    train = documents(tmp_path / "one", "train")
    assert train == distinct(texts)[: len(train)]
    file = TokenFile.open(tmp_path / "one")
    if len(train) < len(distinct(texts)):
        assert file.num_tokens - len(file.document(file.num_documents - 1)) < budget <= file.num_tokens
    else:
        assert budget == 10**9


@pytest.mark.timeout(180)
@pytest.mark.parametrize("margin", [1.25, 0.05])
@pytest.mark.parametrize("duplicates", [False, True])
def test_sample_is_of_the_whole_corpus(
    repeated: tuple[Recipe, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float, duplicates: bool
) -> None:
    """The documents of lowest hash that hold the budget, in their order. margin 0.05: the first bound is too low."""
    monkeypatch.setattr(tokenise, "MARGIN", margin)
    recipe, texts = repeated
    texts = texts if duplicates else distinct(texts)
    whole = changed(recipe, deduplicate=not duplicates, heldout_fraction=0.2)
    everything = prepare(whole, tmp_path / "whole", processes=1)
    budget = everything.splits["train"].tokens // 4
    recipe = changed(whole, max_tokens=budget, sample="documents")
    manifest = prepare(recipe, tmp_path / "one", processes=1)
    two = prepare(recipe, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") and fingerprints(two) == fingerprints(manifest)

    lengths = {text: len(ids) for text, ids in zip(*_train(tmp_path / "whole"), strict=True)}
    hashes = {text: document_hash(text.encode(), recipe)[0] for text in texts}
    tokens, bound = 0, 0
    for text in sorted((text for text in texts if text in lengths), key=lambda text: hashes[text]):
        tokens += lengths[text]
        bound = hashes[text]
        if tokens >= budget:
            break
    expected = [text for text in texts if hashes[text] <= bound]
    assert documents(tmp_path / "one", "train") == [text for text in expected if text in lengths]
    assert documents(tmp_path / "one", "heldout") == [text for text in expected if text not in lengths]
    assert budget <= manifest.splits["train"].tokens < budget + 5 * max(lengths.values())
    files = {source["path"] for source in manifest.sources if source["sha256"]}
    assert len(files) == 5 and manifest.skipped["not_sampled"] > len(texts) / 2
    other = prepare(changed(recipe, split_seed=7), tmp_path / "other", processes=1)
    assert fingerprints(other) != fingerprints(manifest)


def _train(folder: Path) -> tuple[list[str], list[np.ndarray]]:
    file = TokenFile.open(folder)
    return documents(folder, "train"), [file.document(n) for n in range(file.num_documents)]


def test_sample_larger_than_the_corpus_is_the_corpus(corpus: Recipe, tmp_path: Path) -> None:
    whole = prepare(corpus, tmp_path / "whole", processes=1)
    sampled = prepare(changed(corpus, max_tokens=10**9, sample="documents"), tmp_path / "sampled", processes=1)
    assert fingerprints(whole) == fingerprints(sampled)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample", ["head", "documents"])
def test_killed_run_goes_on(corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: str) -> None:
    """kill -9 in the middle, twice, and on with another number of processes: the same bytes."""
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", 20_000)
    folder = Path(corpus.sources[0])
    for n in range(8):
        (folder / f"more{n}.jsonl").write_bytes(jsonl(many_texts(1500, seed=10 + n % 5)))
    recipe = changed(corpus, deduplicate=True, sample=sample, max_tokens=60_000)
    run_killed_after(recipe, tmp_path / "out", 2, sources.SMALLEST_CHUNK)
    run_killed_after(recipe, tmp_path / "out", 4, sources.SMALLEST_CHUNK)
    resumed = prepare(recipe, tmp_path / "out", processes=1)
    straight = prepare(recipe, tmp_path / "straight", processes=1)
    assert fingerprints(resumed) == fingerprints(straight)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    assert not (tmp_path / "out.partial").exists()


def test_large_splits_have_several_shards(corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(corpus, tmp_path / "whole", processes=1)
    monkeypatch.setattr(assemble, "SHARD_TOKENS", 3000)
    monkeypatch.setattr(assemble, "COPIED_TOKENS", 100)
    manifest = prepare(corpus, tmp_path / "cut", processes=1)
    shards = manifest.splits["train"].shards
    assert [shard.tokens_file for shard in shards] == [f"train-{n:05d}.bin" for n in range(len(shards))]
    assert len(shards) >= 3 and all(shard.tokens >= 3000 for shard in shards[:-1])
    for split in ("train", "heldout"):
        one, cut = TokenFile.open(tmp_path / "whole", split), TokenFile.open(tmp_path / "cut", split, verify=True)
        assert cut.tokens.tolist() == one.tokens.tolist()
        assert cut.document_ends.tolist() == one.document_ends.tolist()
        assert cut.text_bytes == one.text_bytes == sum(shard.text_bytes for shard in manifest.splits[split].shards)
    assert manifest.splits["train"].fingerprint != whole.splits["train"].fingerprint
    assert prepare(corpus, tmp_path / "cut") == manifest


def test_files_of_older_versions_are_taken_for_what_they_are(corpus: Recipe, tmp_path: Path) -> None:
    """Choices that came later have their defaults there."""
    import dataclasses

    manifest = prepare(corpus, tmp_path / "out", processes=1)
    old = {key: value for key, value in manifest.recipe.items() if key not in ("sample", "deduplicate")}
    dataclasses.replace(manifest, recipe=old).save(tmp_path / "out")
    assert fingerprints(prepare(corpus, tmp_path / "out")) == fingerprints(manifest)
    with pytest.raises(DataError, match=r"another data\.deduplicate: False, now True"):
        prepare(changed(corpus, deduplicate=True), tmp_path / "out")


def test_sample_without_a_size_is_refused(corpus: Recipe, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sample=documents: set data\.max_tokens"):
        prepare(changed(corpus, sample="documents"), tmp_path / "out")
    with pytest.raises(DataError, match=r"data\.sample: expected head or documents, got 'tail'"):
        prepare(changed(corpus, sample="tail"), tmp_path / "out")
