"""Text to token files: `python -m scripts.prepare data=NAME [data.sources=[...] data.tokenizer=... processes=N]`.

The work is done by `efla_data.corpus.prepare`; this is its command line. A stopped run continues where it was.
"""

import sys
import time

from efla_data.corpus.prepare import available_cores, prepare
from efla_data.corpus.progress import Progress
from efla_data.corpus.recipe import Recipe

from efla_lm.errors import UserError
from efla_lm.settings import DataSettings, PrepareSettings, entry


def make_recipe(data: DataSettings) -> Recipe:
    """The recipe of the token files. Raises UserError for a mixture, which is made of token files."""
    if data.mixture:
        raise UserError(
            f"data.mixture={data.mixture} is mixed in training from token files that are there: prepare each folder by "
            "itself, with its own data= and one tokenizer"
        )
    return data.recipe()


class Line:
    """Progress on one line that is written over on a terminal, on a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def show(self, progress: Progress) -> None:
        """Print the progress, with an estimate of the time left."""
        now = time.monotonic()
        if not self._terminal and now - self._last < 10:
            return
        self._last = now
        rate = progress.tokens / max(progress.seconds, 1e-9)
        left = progress.seconds_left
        text = (
            f"{progress.fraction:4.0%}  part {progress.chunks_done} of {progress.chunks}  "
            f"{progress.tokens / 1e6:,.1f} M tokens  {rate / 1e6:.2f} M tokens/s  "
            f"{'' if left is None else f'{left:,.0f} s left'}"
        )
        print(
            f"\r\033[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def tell(self, text: str) -> None:
        """Print a note on a line of its own."""
        self.end()
        print(f"note: {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line of a terminal."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@entry("prepare", PrepareSettings)
def main(settings: PrepareSettings) -> None:
    """Turn text into token files that training reads: tokenise, hold out documents, write a manifest."""
    recipe, processes = make_recipe(settings.data), settings.processes or available_cores()
    line = Line()
    start = time.monotonic()
    try:
        manifest = prepare(recipe, settings.data.dir, processes, settings.overwrite, line.show, line.tell)
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
