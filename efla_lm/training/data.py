"""The data of a run: token files of one folder, or of several mixed by weight, and the batches cut from them."""

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
from efla_lm.settings import DataSettings
from efla_lm.training.batch_plan import BatchPlan


@dataclass(frozen=True)
class Corpus:
    """Open token files, all of one tokenizer.

    train: one, or those of data.mixture in its order. heldout: that of data.dir, None if it has none.
    """

    name: str
    train: list[TokenFile]
    heldout: TokenFile | None

    @property
    def first(self) -> TokenFile:
        """The file that stands for all if only the tokenizer matters."""
        return self.train[0]

    @property
    def num_tokens(self) -> int:
        """Training tokens of all files."""
        return sum(file.num_tokens for file in self.train)


def open_corpus(data: DataSettings, world: World) -> Corpus:
    """The token files of a run. Rank 0 alone checks their bytes (data.verify).

    Raises DataError for a missing or damaged file, UserError for files without their tokenizer, with another BOS than
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
        # a BOS that no text contains makes no difference: a tokenizer may name one that its copy here does not name
        for name in ("vocab_size", "sha256", "eos_id", "add_bos", *(["bos_id"] if first.add_bos else [])):
            if getattr(given, name) != getattr(first, name):
                raise UserError(
                    f"data.mixture: {train[0].folder} has tokenizer {name}={getattr(first, name)}, {other.folder} "
                    f"{getattr(given, name)}: prepare all with one data.tokenizer and data.bos"
                )
    heldout = TokenFile.open(data.dir, "heldout", verify) if "heldout" in home.manifest.splits else None
    return Corpus(data.name, train, heldout)


def _check_tokenizer(file: TokenFile, data: DataSettings) -> None:
    if not (file.tokenizer_dir / "tokenizer.json").is_file():
        hint = "put the tokenizer that made the ids there, as exports and evaluation need it"
        raise UserError(f"{file.tokenizer_dir}: expected tokenizer.json, found none; {hint}")
    made = file.manifest.tokenizer.add_bos
    if made != data.bos:  # evaluation reads data.bos in the run's config
        keys = f"data.bos={str(data.bos).lower()}", f"data.bos={str(made).lower()}"
        raise UserError(f"{keys[0]}, but {file.folder} was made with {keys[1]}: set it so, or another data.dir")


def build_loaders(
    data: DataSettings, plan: BatchPlan, corpus: Corpus, world: World, seed: int
) -> tuple[TrainLoader, ValidationLoader | None]:
    """The training and validation batches of this rank."""
    world.on_main(lambda: _sequences(data, corpus))  # writes the plans of packed documents, which the others read
    sequences, heldout = _sequences(data, corpus)
    train = TrainLoader(sequences, plan.sequences, plan.micro_batch, world.rank, world.size, seed)
    if heldout is None:
        return train, None
    return train, ValidationLoader(heldout, plan.micro_batch, world.rank, world.size)


def _sequences(data: DataSettings, corpus: Corpus) -> tuple[Sequences, Sequences | None]:
    """The training and the held-out tokens, cut into sequences."""

    def cut(file: TokenFile, tail: bool) -> Sequences:
        if data.packing == "documents":
            return PackedSequences(file, data.context, data.max_documents)
        return StreamSequences(file, data.context, data.mask_boundaries, tail)

    parts = [cut(file, tail=False) for file in corpus.train]
    heldout = None if corpus.heldout is None else cut(corpus.heldout, tail=True)
    return MixedSequences(parts, data.weights) if data.mixture else parts[0], heldout


def describe_packing(sequences: Sequences) -> str:
    """How full the sequences of packed documents are; empty for sequences of the stream, which are always full."""
    parts = sequences.parts if isinstance(sequences, MixedSequences) else [sequences]
    packed = [part for part in parts if isinstance(part, PackedSequences)]
    if not packed:
        return ""
    filled = sum(part.filled * part.count for part in packed) / sum(part.count for part in packed)
    hint = "" if filled > 0.9 else ": raise data.max_documents to fill more"
    return f"whole documents, {filled:.1%} of positions filled, at most {packed[0].max_documents} per sequence{hint}"


def data_identity(data: DataSettings, sequences: Sequences) -> dict[str, Any]:
    """The data that a resumed run must share with its checkpoint, by the name of the key that sets it."""
    identity: dict[str, Any] = {
        "data.fingerprint": sequences.fingerprint,
        "data.context": data.context,
        "data.mask_boundaries": data.mask_boundaries,
    }
    if data.packing != "stream":  # older versions had the stream only and saved no such key
        most = default_max_documents(data.context) if data.max_documents is None else data.max_documents
        identity |= {"data.packing": f"{data.packing} (plan {PACKING_VERSION})", "data.max_documents": most}
    return identity
