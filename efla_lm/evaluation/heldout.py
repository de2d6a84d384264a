"""Held-out text as a perplexity task: documents of the held-out token file, decoded by the tokenizer that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile
from lm_eval.tasks import TaskManager

from efla_lm.evaluation.tasks import MissingTask, TaskSet

NAME = "heldout"
VERSION = 1.0


def documents(folder: Path, tokenizer: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(documents, description) of the held-out split: BOS and EOS cut off, the rest decoded to text.

    Raises:
        MissingTask: the folder has no held-out token file, or the file has no text.
    """
    try:
        tokens = TokenFile.open(folder, "heldout")
    except (DataError, OSError) as error:
        raise MissingTask(f"task {NAME}: {error} (for eval.py: tasks.data_dir)") from error
    first = 1 if tokens.manifest.tokenizer.add_bos else 0  # EOS always ends a document
    texts = [
        tokenizer.decode(tokens.document(index)[first:-1].tolist(), clean_up_tokenization_spaces=False)
        for index in range(tokens.num_documents)
    ]
    rows = [{"text": text} for text in texts if text.strip()]
    if not rows:
        raise MissingTask(f"task {NAME}: the held-out split of {folder} holds no text")
    description = {
        "path": str(folder),
        "fingerprint": tokens.fingerprint,
        "documents": len(rows),
        "text_bytes": tokens.text_bytes,
        "decoded_bytes": sum(len(text.encode("utf-8")) for text in texts),
    }
    return rows, description


def load_heldout(folder: Path, tokenizer: Any) -> TaskSet:
    """The task `heldout`: word and byte perplexity and bits per byte of whole documents, in rolling windows."""
    rows, description = documents(folder, tokenizer)
    table = datasets.Dataset.from_list(rows)

    def read_heldout(**metadata: Any) -> dict[str, datasets.Dataset]:  # lm-eval passes the task's metadata
        return {"test": table}

    config = {
        "task": NAME,
        "custom_dataset": read_heldout,
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
        "metadata": {"version": VERSION},
    }
    manager = TaskManager(include_defaults=False)
    return TaskSet(dict(manager.load([config])["tasks"]), sources={NAME: description})
