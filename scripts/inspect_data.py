"""What a folder of token files holds: `python -m scripts.inspect_data data=NAME [split=heldout document=7 count=2]`.

Prints sizes and checks, then documents turned back into text. `data.verify=true` reads every byte and compares hashes.
"""

from dataclasses import dataclass, field

from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile
from tokenizers import Tokenizer

from efla_lm.errors import UserError
from efla_lm.settings import DataSettings, entry, key


@dataclass
class InspectSettings:
    """Which documents to show, and how."""

    split: str = key("train", "which documents", choices=("train", "heldout"))
    document: int = key(0, "number of the first one, from 0; negative: from the end")
    count: int = key(3, "how many")
    characters: int | None = key(500, "of each document's beginning; null: all")
    ids: bool = key(False, "show token ids instead of text; `characters` then counts ids")
    data: DataSettings = field(default_factory=DataSettings)

    def validate(self) -> None:
        """Check values. Raises UserError."""
        for name in ("count", "characters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected 1 or more")


def load_tokenizer(token_file: TokenFile) -> Tokenizer:
    """The tokenizer kept beside the token files."""
    path = token_file.tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: these token files were written without a tokenizer, use ids=true")
    return Tokenizer.from_file(str(path))


@entry("prepare", InspectSettings)
def main(settings: InspectSettings) -> None:
    """Print what a folder of token files holds, and some of its documents as text."""
    token_file = TokenFile.open(settings.data.dir, settings.split, verify=settings.data.verify)
    info = token_file.manifest.tokenizer
    checked = "hashes match" if settings.data.verify else "sizes match"
    per_document = token_file.num_tokens / max(token_file.num_documents, 1)
    print(f"{token_file.folder} ({token_file.split}), {checked}, fingerprint {token_file.fingerprint}")
    shards = len(token_file.manifest.splits[token_file.split].shards)
    print(
        f"  {token_file.num_tokens:,} tokens, {token_file.num_documents:,} documents, {per_document:,.1f} tokens each, "
        f"{shards} shard(s)"
    )
    print(f"  {token_file.text_bytes:,} bytes of text, {token_file.tokens.dtype} ids of {info.vocab_size}")
    print(f"  tokenizer {info.name}: BOS {info.bos_id} {'on' if info.add_bos else 'off'}, EOS {info.eos_id}")
    tokenizer = None if settings.ids else load_tokenizer(token_file)
    first = settings.document + (token_file.num_documents if settings.document < 0 else 0)
    if not 0 <= first < token_file.num_documents:
        last = token_file.num_documents - 1
        raise DataError(f"document={settings.document}: {settings.split} has documents 0 to {last}")
    for number in range(first, min(first + settings.count, token_file.num_documents)):
        ids = token_file.document(number)
        print(f"\n--- document {number}, {len(ids):,} tokens")
        if tokenizer is None:
            shown = ids if settings.characters is None else ids[: settings.characters]
            print(*shown.tolist())
        else:
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            print(text if settings.characters is None else text[: settings.characters])


if __name__ == "__main__":
    main()
