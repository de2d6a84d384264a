"""The settings of a corpus: its recipe (see `efla_data.corpus.recipe`), its folder, and how training reads it."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import dataclasses
from dataclasses import dataclass, field

from efla_data.corpus.recipe import HELDOUT_FRACTION, Recipe
from efla_data.errors import DataError
from efla_data.fields import PATH, key

from efla_lm.errors import UserError
from efla_lm.settings.expect import exactly_one, positive


@dataclass
class DataSettings(Recipe):
    """One corpus: where its text comes from, how it is tokenised, where its token files are, how they are read."""

    heldout_fraction: float | None = key(0.01, HELDOUT_FRACTION, instead_of="heldout_sources")
    name: str = key("pydoc", "name of the corpus")
    dir: str = key("data/tokens/${data.name}", "folder of the token files", path=PATH)
    context: int = key(
        2048,
        "positions of one training sequence",
        also_called=("seq_len", "seq_length", "sequence_length", "max_seq_len", "max_seq_length", "block_size"),
    )
    packing: str = key(
        "stream",
        "stream: sequences cut from the concatenated documents [paper]; documents: whole documents, each from an "
        "empty state",
        choices=("stream", "documents"),
    )
    max_documents: int | None = key(
        None, "documents per sequence (data.packing=documents); null: one per 64 positions, at least 8"
    )
    mixture: list[str] = key([], "folders of token files to mix for training; empty: data.dir alone", path=PATH)
    weights: list[float] = key([], "share of each folder of data.mixture in the sequences, in any unit")
    mask_boundaries: bool = key(False, "ignore the loss of the position that predicts the next document's first token")
    verify: bool = key(False, "check the SHA-256 of the token files before use")

    def recipe(self) -> Recipe:
        """The part that decides which ids come out."""
        return Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)})

    def validate(self) -> None:
        """Check what does not need the corpus. Raises UserError."""
        exactly_one("data", self, "heldout_fraction", "heldout_sources")
        positive("data.", self, "context", "vocab_size", "max_tokens", "max_documents")
        try:
            self.check()
        except DataError as error:
            raise UserError(str(error)) from error
        if len(self.weights) != len(self.mixture) or any(weight <= 0 for weight in self.weights):
            raise UserError(
                f"data.weights: got {self.weights}, expected {len(self.mixture)} numbers above 0, one for each folder "
                f"of data.mixture={self.mixture}"
            )
        if self.packing == "documents" and self.mask_boundaries:
            raise UserError(
                "data.mask_boundaries=true belongs to data.packing=stream: packed documents predict only their own "
                "tokens; set it to false"
            )
        if self.packing == "stream" and self.max_documents is not None:
            raise UserError(
                f"data.max_documents={self.max_documents} belongs to data.packing=documents; set it to null"
            )


@dataclass
class PrepareSettings:
    """All of `python -m scripts.prepare`: the data section as training has it, and how to work."""

    overwrite: bool = key(False, "replace token files that were made from something else")
    processes: int | None = key(None, "worker processes; null: one per core. The result does not depend on it")
    data: DataSettings = field(default_factory=DataSettings)

    def validate(self) -> None:
        """Check values. Raises UserError."""
        positive("", self, "processes")
