"""Small tokenizers, models, task files and runs for the tests of evaluation."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch
from efla_data.corpus.writer import write_token_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from efla_lm import EflaConfig

WORDS = (  # noqa: SIM905
    "river stone light under winter market garden quiet paper window morning letter engine silver answer question "
    "carry follow gather listen promise measure Newton Amazon Thursday the a of and to in is that it was for on with"
).split()
CONTEXT = 48
PAPER = [
    "wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "boolq", "openbookqa",
    "sciq",
]  # fmt: skip


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def make_tokenizer(bos: bool, vocab_size: int = 330) -> PreTrainedTokenizerFast:
    """Byte-level BPE with <s> = 0 and </s> = 1; `bos` = its own call puts <s> in front."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    backend.train_from_iterator([some_words(rng, 200) for _ in range(20)], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def make_model(kind: str, seed: int = 0) -> Any:
    """A tiny random model whose logits differ clearly: `llama`, or a mixer of ours."""
    torch.manual_seed(seed)
    if kind == "llama":
        config: Any = LlamaConfig(
            vocab_size=330, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=CONTEXT, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
    else:
        config = EflaConfig(
            mixer=kind, vocab_size=330, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_heads=2,
            max_position_embeddings=CONTEXT, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def save_export(folder: Path, kind: str = "efla", bos: bool = False, seed: int = 0) -> Path:
    make_model(kind, seed).save_pretrained(folder)
    make_tokenizer(bos).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def write_task_files(folder: Path, documents: int = 5) -> Path:
    """All ten tasks of the paper with the fields of their hub data sets; some documents are longer than the context."""
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)

    def choices(count: int) -> dict[str, Any]:
        return {"text": [some_words(rng, rng.randint(1, 4)) for _ in range(count)], "label": list("ABCDE"[:count])}

    def arc(count: int, n: int) -> dict[str, Any]:
        question = some_words(rng, 8)
        return {"id": str(n), "question": question, "choices": choices(count), "answerKey": rng.choice("ABCDE"[:count])}

    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in PAPER}
    for n in range(documents):
        rows["wikitext"].append({"page": f" = {some_words(rng, 2)} = \n \n {some_words(rng, 30 * n + 1)} . \n"})
        rows["lambada_openai"].append({"text": some_words(rng, 12 + 20 * n)})
        rows["piqa"].append(
            {"goal": some_words(rng, 6), "sol1": some_words(rng, 4), "sol2": some_words(rng, 5), "label": n % 2}
        )
        rows["hellaswag"].append(
            {
                "ind": n,
                "activity_label": "Gardening",
                "ctx_a": some_words(rng, 6) + ".",
                "ctx_b": "he",
                "ctx": "",
                "endings": [some_words(rng, 5 + i) for i in range(4)],
                "label": str(rng.randrange(4)),
            }
        )
        first, second = rng.sample(["Newton", "Amazon", "Thursday"], 2)
        rows["winogrande"].append(
            {
                "sentence": f"{some_words(rng, 5)} _ {some_words(rng, 4)}.",
                "option1": first,
                "option2": second,
                "answer": rng.choice("12"),
            }
        )
        rows["arc_easy"].append(arc(4, n))
        rows["arc_challenge"].append(arc(3 + n % 3, n))
        rows["boolq"].append({"question": some_words(rng, 5), "passage": some_words(rng, 25 * n + 5), "label": n % 2})
        rows["openbookqa"].append(
            {"id": str(n), "question_stem": some_words(rng, 7), "choices": choices(4), "answerKey": rng.choice("ABCD")}
        )
        rows["sciq"].append(
            {
                "question": some_words(rng, 6),
                "distractor1": some_words(rng, 1),
                "distractor2": some_words(rng, 2),
                "distractor3": some_words(rng, 1),
                "correct_answer": some_words(rng, 1),
                "support": some_words(rng, 20) if n else "",
            }
        )
    for name, split in SPLITS.items():
        suffix = ".jsonl.gz" if name in ("wikitext", "boolq") else ".jsonl"
        write_rows(folder / f"{FILE_STEMS.get(name, name)}_{split}{suffix}", rows[name])
    return folder


SPLITS = {name: "validation" if name in ("piqa", "hellaswag", "winogrande", "boolq") else "test" for name in PAPER}
FILE_STEMS = {"wikitext": "wikitext2_raw", "winogrande": "winogrande_xl"}


def local_file(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"{FILE_STEMS.get(name, name)}_{SPLITS[name]}.jsonl*")
    return path


def write_tokens(folder: Path, texts: list[str]) -> Path:
    """Token files with these held-out documents, and the tokenizer that made them."""
    tokenizer = make_tokenizer(bos=False)
    documents = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 1] for text in texts]
    write_token_files(folder, {"train": documents, "heldout": documents}, 330, 1)
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def write_run(folder: Path, kind: str = "efla", texts: list[str] | None = None) -> Path:
    """A run directory with config.yaml and export/, and token files beside it if held-out texts are given."""
    save_export(folder / "export", kind)
    tokens = folder.parent / f"{folder.name}-tokens"
    if texts is not None:
        write_tokens(tokens, texts)
    (folder / "config.yaml").write_text(f"data:\n  dir: {tokens}\n")
    return folder
