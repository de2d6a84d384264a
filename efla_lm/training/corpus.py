"""The corpus of a run: token files of one folder, or of several mixed by weight, and the windows cut from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from efla_data.loader.batches import TrainLoader, ValidationLoader
from efla_data.loader.mixture import MixedSequences
from efla_data.loader.packed import PackedSequences, default_max_documents
from efla_data.loader.packing import VERSION as PACKING_VERSION
from efla_data.loader.sequences import Sequences, StreamSequences
from efla_data.loader.token_file import TokenFile

from efla_lm.errors import UserError
from efla_lm.parallel.distributed import World
from efla_lm.settings import DataSettings, TrainSettings
from efla_lm.training.batch_plan import Budget


@dataclass(frozen=True)
class Corpus:
    """Open token files, all of one tokenizer.

    train: one, or those of data.mixture in its order. heldout: of data.dir, None if it holds none out.
    """

    train: list[TokenFile]
    heldout: TokenFile | None

    @property
    def first(self) -> TokenFile:
        """Stands for all where only the tokenizer matters."""
        return self.train[0]

    @property
    def num_tokens(self) -> int:
        """Training tokens of all parts."""
        return sum(file.num_tokens for file in self.train)


def open_corpus(data: DataSettings, world: World) -> Corpus:
    """The token files of a run. Bytes are checked (data.verify) by rank 0 alone.

    Raises DataError for what is missing or damaged, UserError for files without their tokenizer, with another BOS than
    data.bos, or with different tokenizers.
    """

    def check() -> None:
        for file in _open(data, data.verify).train:
            _check_tokenizer(file, data)

    world.on_main(check)
    return _open(data, verify=False)


def _open(data: DataSettings, verify: bool) -> Corpus:
    train = [TokenFile.open(folder, "train", verify) for folder in data.mixture or [data.dir]]
    first = train[0].manifest.tokenizer
    home = train[0] if not data.mixture else TokenFile.open(data.dir, "train")
    for other in [*train[1:], home]:
        given = other.manifest.tokenizer
        # a BOS that is in no text makes no difference: a tokenizer names one, its copy beside token files does not
        for name in ("vocab_size", "sha256", "eos_id", "add_bos", *(["bos_id"] if first.add_bos else [])):
            if getattr(given, name) != getattr(first, name):
                raise UserError(
                    f"data.mixture: {train[0].folder} has tokenizer {name}={getattr(first, name)}, {other.folder} "
                    f"{getattr(given, name)}: prepare all with one data.tokenizer and data.bos"
                )
    heldout = TokenFile.open(data.dir, "heldout", verify) if "heldout" in home.manifest.splits else None
    return Corpus(train, heldout)


def _check_tokenizer(file: TokenFile, data: DataSettings) -> None:
    if not (file.tokenizer_dir / "tokenizer.json").is_file():
        hint = "put the tokenizer that made the ids there, as exports and evaluation need it"
        raise UserError(f"{file.tokenizer_dir}: expected tokenizer.json, found none; {hint}")
    made = file.manifest.tokenizer.add_bos
    if made != data.bos:  # the run's config is where evaluation reads how texts were opened
        keys = f"data.bos={str(data.bos).lower()}", f"data.bos={str(made).lower()}"
        raise UserError(f"{keys[0]}, but {file.folder} was made with {keys[1]}: set it so, or another data.dir")


def build_loaders(
    settings: TrainSettings, budget: Budget, corpus: Corpus, world: World
) -> tuple[TrainLoader, ValidationLoader | None]:
    """This rank's training and validation batches."""
    data = settings.data
    world.on_main(lambda: _windows(data, corpus))  # makes the plans of packed documents, once for all
    windows, heldout = _windows(data, corpus)
    train = TrainLoader(windows, budget.windows, budget.micro_batch, world.rank, world.size, settings.seed)
    if heldout is None:
        return train, None
    return train, ValidationLoader(heldout, budget.micro_batch, world.rank, world.size)


def _windows(data: DataSettings, corpus: Corpus) -> tuple[Sequences, Sequences | None]:
    """Windows of the training and of the held-out tokens."""

    def cut(file: TokenFile, tail: bool) -> Sequences:
        if data.packing == "documents":
            return PackedSequences(file, data.context, data.max_documents)
        return StreamSequences(file, data.context, data.mask_boundaries, tail)

    parts = [cut(file, tail=False) for file in corpus.train]
    heldout = None if corpus.heldout is None else cut(corpus.heldout, tail=True)
    return MixedSequences(parts, data.weights) if data.mixture else parts[0], heldout


def describe(windows: Sequences) -> str:
    """How full the sequences of a loader are, in words; empty for sequences of the stream, which are always full."""
    parts = windows.parts if isinstance(windows, MixedSequences) else [windows]
    packed = [part for part in parts if isinstance(part, PackedSequences)]
    if not packed:
        return ""
    filled = sum(part.filled * part.count for part in packed) / sum(part.count for part in packed)
    hint = "" if filled > 0.9 else ": raise data.max_documents to fill more"
    return f"whole documents, {filled:.1%} of positions filled, at most {packed[0].max_documents} per sequence{hint}"


def identity(data: DataSettings, windows: Sequences) -> dict[str, Any]:
    """What a continued run must share with its checkpoint, by the name of the key that sets it."""
    ours: dict[str, Any] = {
        "data.fingerprint": windows.fingerprint,
        "data.context": data.context,
        "data.mask_boundaries": data.mask_boundaries,
    }
    if data.packing != "stream":  # absent otherwise: runs of versions that had the stream alone go on
        most = default_max_documents(data.context) if data.max_documents is None else data.max_documents
        ours |= {"data.packing": f"{data.packing} (plan {PACKING_VERSION})", "data.max_documents": most}
    return ours
