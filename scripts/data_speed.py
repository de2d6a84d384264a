"""How fast data are prepared and read: `python -m scripts.data_speed data=local data.sources=[...] data.tokenizer=...`.

Three measurements on the same machine, one JSON:
* `prepare`: text to token files by one process, and `datasets.map` with the same tokenizer over the same files, by one
  process as well. Tokens per second of processor time, which other work on the machine does not change;
* `loader`: batches from the page cache, by `readers` processes at once, each a rank of its own;
* `seek`: a loader made anew and its batch of step one million.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from efla_data.corpus.sources import find_files
from efla_data.loader.batches import TrainLoader
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile
from efla_kernels.environment import commit

from efla_lm.errors import UserError
from efla_lm.settings import PATH, DataSettings, check_output, entry, key
from scripts.prepare import make_recipe

# Each runs in a process of its own and prints what it used: processor seconds, peak memory, tokens.
PREPARE = """
import json, resource, sys, time
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
start = time.monotonic()
manifest = prepare(Recipe.from_dict(json.loads(sys.argv[1])), sys.argv[2], processes=1)
used = resource.getrusage(resource.RUSAGE_SELF)
tokens = sum(split.tokens for split in manifest.splits.values())
print(json.dumps([used.ru_utime + used.ru_stime, time.monotonic() - start, used.ru_maxrss / 2**20, tokens]))
"""
MAP = """
import json, resource, sys, time
from datasets import load_dataset
from transformers import AutoTokenizer
kind, files, tokenizer, text_field, cache = json.loads(sys.argv[1])
rows = load_dataset(kind, data_files=files, split="train", cache_dir=cache)
tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
def encode(batch):
    ids = tokenizer(batch[text_field], add_special_tokens=False).input_ids
    return {"input_ids": [[*document, tokenizer.eos_token_id] for document in ids]}
before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, keep_in_memory=False)
used, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - start
seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
tokens = 0
for batch in encoded.with_format("arrow").iter(1000):
    tokens += len(batch["input_ids"].combine_chunks().flatten())
print(json.dumps([seconds, wall, used.ru_maxrss / 2**20, tokens]))
"""
READ = """
import json, sys, time
from efla_data.loader.batches import TrainLoader
from efla_data.loader.token_file import TokenFile
from efla_data.loader.sequences import StreamSequences
folder, context, micro_batch, rank, ranks, seconds = json.loads(sys.argv[1])
sequences = StreamSequences(TokenFile.open(folder), context)
loader = TrainLoader(sequences, micro_batch * ranks, micro_batch, rank, ranks, seed=1)
loader.batch(0, 0)
print("ready", flush=True)
sys.stdin.readline()
start, step = time.monotonic(), 0
while time.monotonic() - start < seconds:
    loader.batch(step, 0)
    step += 1
print(step * micro_batch * context / (time.monotonic() - start))
"""
FIGURES = ("processor_seconds", "seconds", "peak_gib", "tokens")


@dataclass
class DataSpeedSettings:
    """What to measure, and on which corpus."""

    compare: bool = key(True, "also run datasets.map")
    readers: int = key(2, "processes that read batches at once")
    micro_batch: int = key(8, "sequences of data.context in a batch")
    seconds: float = key(5.0, "how long batches are read")
    out: str = key("results/data_speed.json", "where the figures go", path=PATH)
    data: DataSettings = field(default_factory=DataSettings)

    def validate(self) -> None:
        """Check values. Raises UserError."""
        for name in ("readers", "micro_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.seconds <= 0:
            raise UserError(f"seconds={self.seconds}: expected more than 0")


@entry("prepare", DataSpeedSettings)
def main(settings: DataSpeedSettings) -> None:
    """Measure preparation beside datasets.map, reading, and a seek."""
    data = settings.data
    files = [path for source in data.sources for path in find_files(source)]
    kinds = {"parquet" if path.endswith(".parquet") else "json" for path in files}
    if len(kinds) != 1 or any(".txt" in Path(path).suffixes for path in files):
        raise UserError("data.sources: expected files of JSON lines, or of parquet, which datasets.map can read too")
    out = Path(settings.out)
    check_output(out)
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "commit": commit()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tokens"
        recipe = make_recipe(data)
        report["prepare"] = _figures(PREPARE, json.dumps(recipe.to_dict()), str(folder))
        if settings.compare:
            job = [kinds.pop(), files, str(folder / "tokenizer"), data.text_field, f"{temporary}/cache"]
            report["datasets_map"] = _figures(MAP, json.dumps(job))
            rates = [report[name]["tokens_per_processor_second"] for name in ("prepare", "datasets_map")]
            report["ratio"] = rates[0] / rates[1]
        report["loader"] = _read(settings, folder)
        report["seek_seconds"] = _seek(folder, data.context, settings.micro_batch)
    report["settings"] = asdict(settings)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(_words(report) + f"\n{out}")


def _environment() -> dict[str, str]:
    """What a subprocess needs to import what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _figures(program: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        why = (done.stderr.strip() or "nothing was printed").splitlines()[-1]
        raise UserError(f"the measurement ended with exit code {done.returncode}: {why}")
    figures = dict(zip(FIGURES, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return figures | {"tokens_per_processor_second": figures["tokens"] / figures["processor_seconds"]}


def _read(settings: DataSpeedSettings, folder: Path) -> dict[str, float]:
    """Tokens per second of all readers together."""
    processes = []
    for rank in range(settings.readers):
        job = [str(folder), settings.data.context, settings.micro_batch, rank, settings.readers, settings.seconds]
        command = [sys.executable, "-c", READ, json.dumps(job)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
        )
        processes.append(process)
    for process in processes:
        assert process.stdout is not None and process.stdin is not None
        if process.stdout.readline().strip() != "ready":
            raise UserError("a reader did not start: see above")
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    rates = [float(process.communicate()[0]) for process in processes]
    return {"readers": len(rates), "tokens_per_second": sum(rates)}


def _seek(folder: Path, context: int, micro_batch: int) -> float:
    start = time.monotonic()
    TrainLoader(StreamSequences(TokenFile.open(folder), context), micro_batch, micro_batch, seed=1).batch(10**6, 0)
    return time.monotonic() - start


def _words(report: dict[str, Any]) -> str:
    lines = []
    for name in ("prepare", "datasets_map"):
        if name in report:
            row = report[name]
            lines.append(
                f"{name:13} {row['tokens'] / 1e6:8.1f} M tokens, {row['tokens_per_processor_second'] / 1e6:.2f} M per "
                f"processor second, {row['seconds']:.0f} s, peak {row['peak_gib']:.2f} GiB"
            )
    if "ratio" in report:
        lines.append(f"{'ratio':13} {report['ratio']:8.1f}")
    reading = report["loader"]
    lines.append(
        f"{'loader':13} {reading['tokens_per_second'] / 1e6:8.0f} M tokens/s by {reading['readers']} processes"
    )
    lines.append(f"{'seek':13} {report['seek_seconds']:8.3f} s to step one million")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
