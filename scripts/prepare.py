"""Text to token files: `python -m scripts.prepare data=NAME [data.sources=[...] data.tokenizer=... processes=N]`.

The work is done by `efla_data.corpus.prepare`; this is its command line. A stopped run continues where it was.
"""

import time

from efla_data.corpus.prepare import available_cores, prepare
from efla_data.corpus.progress import Progress
from efla_data.corpus.recipe import Recipe

from efla_lm.errors import UserError
from efla_lm.settings import DataSettings, PrepareSettings, entry
from scripts.study.progress import ProgressLine


def make_recipe(data: DataSettings) -> Recipe:
    """The recipe of the token files. Raises UserError for a mixture, which is made of token files."""
    if data.mixture:
        raise UserError(
            f"data.mixture={data.mixture} is mixed in training from token files that are there: prepare each folder by "
            "itself, with its own data= and one tokenizer"
        )
    return data.recipe()


def progress_text(progress: Progress) -> str:
    """The share that is done, the speed, and an estimate of the time left."""
    rate = progress.tokens / max(progress.seconds, 1e-9)
    left = progress.seconds_left
    return (
        f"{progress.fraction:4.0%}  part {progress.chunks_done} of {progress.chunks}  "
        f"{progress.tokens / 1e6:,.1f} M tokens  {rate / 1e6:.2f} M tokens/s  "
        f"{'' if left is None else f'{left:,.0f} s left'}"
    )


@entry("prepare", PrepareSettings)
def main(settings: PrepareSettings) -> None:
    """Turn text into token files that training reads: tokenise, hold out documents, write a manifest."""
    recipe, processes = make_recipe(settings.data), settings.processes or available_cores()
    line = ProgressLine()

    def show(progress: Progress) -> None:
        line.show(progress_text(progress))

    def tell(text: str) -> None:
        line.end(f"note: {text}")

    start = time.monotonic()
    try:
        manifest = prepare(recipe, settings.data.dir, processes, settings.overwrite, show, tell)
    finally:
        line.end()
    print(f"{settings.data.dir}  ({time.monotonic() - start:.1f} s, {processes} processes)")
    for name, split in manifest.splits.items():
        size = f"{split.tokens:,} tokens, {split.documents:,} documents, {split.text_bytes:,} bytes of text"
        print(f"  {name:8} {size}, fingerprint {split.fingerprint[:12]}")
    tokenizer = manifest.tokenizer
    print(f"  tokenizer {tokenizer.name}: {tokenizer.vocab_size} ids, BOS {'on' if tokenizer.add_bos else 'off'}")
    if manifest.skipped:
        print("  skipped " + ", ".join(f"{reason} {count:,}" for reason, count in manifest.skipped.items()))
        for example in manifest.skipped_examples[:3]:
            print(f"    {example['file']} record {example['record']}: {example['reason']}")
        if len(manifest.skipped_examples) > 3:
            print("    more in manifest.json")


if __name__ == "__main__":
    main()
