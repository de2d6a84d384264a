"""The six synthetic tasks of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid Architectures").

Each task is a rule that makes pairs of inputs [N, T] and targets [N, T] (-100 where nothing is asked). Sizes, the axes
of difficulty and the training targets follow the published benchmark (its release of 2024); the generators are our own
and draw whole arrays, so a data set takes a second. Train and test sets come from separate streams of one seed; the one
fixed mapping of `memorization` is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from efla_data.errors import DataError

IGNORED = -100
TEST_EXAMPLES = 1280
MAPPING_SEED = 12345
SPLITS = ("train", "test")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """One level of difficulty of a task."""

    task: str
    vocab_size: int
    length: int
    train_examples: int = 12_800
    noise_vocab: int = 0  # the last ids before the special ones
    noise: float = 0.0  # share of pairs that are noise
    motif: int = 1  # most tokens of a key, and of a value
    copies: int = 0  # tokens to copy

    @property
    def label(self) -> str:
        """What tells this setting from the task's others."""
        parts = [f"vocab {self.vocab_size}", f"length {self.length}", f"examples {self.train_examples}"]
        parts += [f"noise {self.noise:g}"] if self.noise_vocab else []
        parts += [f"copies {self.copies}"] if self.copies else []
        return ", ".join(parts)


BASELINES = {
    "compression": Setting("compression", 16, 32),
    "fuzzy_recall": Setting("fuzzy_recall", 16, 128, motif=3),
    "in_context_recall": Setting("in_context_recall", 16, 128),
    "memorization": Setting("memorization", 256, 32, train_examples=256),
    "noisy_recall": Setting("noisy_recall", 32, 128, noise_vocab=16, noise=0.2),
    "selective_copy": Setting("selective_copy", 16, 256, copies=16),
}
_FEWER = (6400, 3200, 1600, 800)
_RECALL = {"vocab_size": (32, 64, 128), "length": (256, 512, 1024), "train_examples": _FEWER}
CHANGES: dict[str, dict[str, tuple]] = {
    "compression": {"vocab_size": (32, 64, 128), "length": (64, 128, 256), "train_examples": _FEWER},
    "fuzzy_recall": _RECALL,
    "in_context_recall": _RECALL,
    "memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
    "noisy_recall": _RECALL | {"vocab_size": (48, 80, 144), "noise": (0.4, 0.6, 0.8)},
    "selective_copy": {
        "vocab_size": (32, 64, 128),
        "length": (512, 1024),
        "train_examples": _FEWER,
        "copies": (32, 64, 96),
    },
}


def settings_of(task: str) -> list[Setting]:
    """The baseline of a task and every change of one of its axes, in the benchmark's order."""
    if task not in BASELINES:
        raise DataError(f"task: expected one of {', '.join(BASELINES)}, got {task!r}")
    base = BASELINES[task]
    changed = [replace(base, **{axis: value}) for axis, values in CHANGES[task].items() for value in values]
    return [base, *changed]


def generate(setting: Setting, split: str, examples: int, seed: int = 12345) -> tuple[Ints, Ints]:
    """(inputs, targets), both [examples, T] int64, of the split `train` or `test`.

    The recall tasks train on every next token and are tested on values of keys seen before alone, as the benchmark
    does; the other tasks ask the same in both.
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected train or test, got {split!r}")
    generator = np.random.default_rng([seed, SPLITS.index(split)])
    return _GENERATORS[setting.task](setting, split == "train", examples, generator)


def _in_context_recall(
    setting: Setting, training: bool, count: int, generator: np.random.Generator
) -> tuple[Ints, Ints]:
    """Pairs key, value; a key keeps its value through the sequence. Asked: the value of every key seen before.

    The last pair's key is one of those seen. With noise, a pair is replaced by two noise tokens with probability
    `noise`, but for one pair (so that there is a key to ask for).
    """
    usable = setting.vocab_size - setting.noise_vocab
    keys, pairs = usable // 2, setting.length // 2
    if setting.length % 2 or pairs < 2:
        raise DataError(f"length: expected an even number of at least 4 for {setting.task}, got {setting.length}")
    mapping = generator.integers(keys, usable, (count, keys))
    key = generator.integers(0, keys, (count, pairs))
    is_noise = generator.random((count, pairs)) < setting.noise
    is_noise[np.arange(count), generator.integers(0, pairs - 1, count)] = False
    is_noise[:, -1] = False
    appeared = np.zeros((count, keys), bool)
    rows = np.repeat(np.arange(count), pairs - 1)
    shown = ~is_noise[:, :-1].ravel()
    appeared[rows[shown], key[:, :-1].ravel()[shown]] = True
    key[:, -1] = np.where(appeared, generator.random((count, keys)), -1.0).argmax(1)
    value = np.take_along_axis(mapping, key, 1)
    if setting.noise_vocab:
        noise = generator.integers(usable, usable + setting.noise_vocab, (2, count, pairs))
        key, value = np.where(is_noise, noise[0], key), np.where(is_noise, noise[1], value)
    tokens = np.stack([key, value], -1).reshape(count, 2 * pairs)
    if training:
        return tokens[:, :-1], tokens[:, 1:]
    same = (key[:, :, None] == key[:, None, :]) & ~is_noise[:, None, :] & ~is_noise[:, :, None]
    seen_before = np.tril(same, -1).any(2)
    asked = np.stack([np.full_like(value, IGNORED), np.where(seen_before, value, IGNORED)], -1).reshape(tokens.shape)
    return tokens[:, :-1], asked[:, 1:]


def _distinct(generator: np.random.Generator, shape: tuple[int, ...], size: int, among: int) -> Ints:
    """[*shape, size] distinct numbers below `among`, every ordered choice equally likely."""
    if among < size:
        raise DataError(f"motif: {size} distinct tokens wanted, the vocabulary has {among} for them")
    chosen: list[Ints] = []
    for n in range(size):
        pick = generator.integers(0, among - n, shape)
        if chosen:
            for smaller in np.moveaxis(np.sort(np.stack(chosen, -1), -1), -1, 0):
                pick = pick + (pick >= smaller)
        chosen.append(pick)
    return np.stack(chosen, -1)


def _fuzzy_recall(setting: Setting, training: bool, count: int, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """As in-context recall with keys and values of 1 to `motif` distinct tokens, padded on the left.

    In tests all keys have `motif` tokens. One pair is planted at a random place and asked for again at the end.
    """
    most, pad = setting.motif, setting.vocab_size - 1
    usable = setting.vocab_size - 1
    keys = usable // 2
    if setting.length < 6 * most:
        raise DataError(f"length: expected at least {6 * most} for motifs of {most} tokens, got {setting.length}")
    slots = setting.length // 2 + 2  # more than a sequence of one-token motifs can use
    sizes = generator.integers(1, most + 1, (2, count, slots))
    if not training:
        sizes[0] = most
    key_motifs = _distinct(generator, (count, slots), most, keys)
    value_motifs = keys + _distinct(generator, (count, slots), most, usable - keys)
    places = generator.random(count)
    inputs = np.full((count, setting.length + 1), pad)
    asked = np.full((count, setting.length + 1), IGNORED)
    for row in range(count):
        motifs = [
            (tuple(k[:a]), tuple(v[:b]))
            for k, v, a, b in zip(
                key_motifs[row].tolist(), value_motifs[row].tolist(), sizes[0, row].tolist(), sizes[1, row].tolist()
            )
        ]
        tokens, questions = _fuzzy_sequence(motifs, setting.length, most, places[row])
        inputs[row, -len(tokens) :] = tokens
        asked[row, -len(tokens) :] = questions
    return (inputs[:, :-1], inputs[:, 1:]) if training else (inputs[:, :-1], asked[:, 1:])


def _fuzzy_sequence(
    motifs: list[tuple[tuple[int, ...], tuple[int, ...]]], length: int, most: int, place: float
) -> tuple[list[int], list[int]]:
    """Tokens and questions of one sequence from its candidate pairs; the last candidate is the planted pair."""
    probe_key, probe_value = motifs[-1]
    probe_size = len(probe_key) + len(probe_value)
    end = length - probe_size - 2 * most
    plant_at = int(place * (end - 2 * most + 1))  # early enough that no pair steps over it and past the end
    mapping: dict[tuple[int, ...], tuple[int, ...]] = {probe_key: probe_value}
    shown: set[tuple[int, ...]] = set()
    tokens: list[int] = []
    questions: list[int] = []
    candidates = iter(motifs)

    def show(key: tuple[int, ...]) -> None:
        value = mapping[key]
        tokens.extend(key + value)
        questions.extend((IGNORED,) * len(key))
        questions.extend(value if key in shown else (IGNORED,) * len(value))
        shown.add(key)

    while len(tokens) < end:
        if len(tokens) >= plant_at and probe_key not in shown:
            show(probe_key)
            continue
        key, value = next(candidates)
        mapping.setdefault(key, value)
        show(key)
    show(probe_key)
    return tokens, questions


def _memorization(setting: Setting, training: bool, count: int, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """Key, blank, key, blank ...; asked at each blank: the key's value under one mapping, fixed for all sequences."""
    usable, blank = setting.vocab_size - 1, setting.vocab_size - 1
    mapping = fixed_mapping(setting.vocab_size)
    key = generator.integers(0, usable // 2, (count, setting.length // 2))
    inputs = np.stack([key, np.full_like(key, blank)], -1).reshape(count, -1)
    targets = np.stack([np.full_like(key, IGNORED), mapping[key]], -1).reshape(count, -1)
    return inputs, targets


def fixed_mapping(vocab_size: int) -> Ints:
    """The value of every key of `memorization`: distinct values, in an order that `MAPPING_SEED` decides."""
    usable = vocab_size - 1
    keys = usable // 2
    return np.random.default_rng(MAPPING_SEED).permutation(np.arange(keys, usable))[:keys]


def _compression(setting: Setting, training: bool, count: int, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """Random tokens and a last token of compression; asked: the whole sequence, from that token's encoding."""
    inputs = generator.integers(0, setting.vocab_size - 1, (count, setting.length))
    inputs[:, -1] = setting.vocab_size - 1
    return inputs, inputs.copy()


def _selective_copy(setting: Setting, training: bool, count: int, generator: np.random.Generator) -> tuple[Ints, Ints]:
    """Tokens among blanks, a copy token, then blanks; asked at those: the tokens in their order.

    Each blank is put before one of the tokens, chosen evenly; so the last token stands right before the copy token.
    """
    n, blank, copy = setting.copies, setting.vocab_size - 2, setting.vocab_size - 1
    blanks = setting.length - 2 * n - 1
    if blanks < 1:
        raise DataError(f"length: expected more than 2 x {n} copies + 1, got {setting.length}")
    tokens = generator.integers(0, blank, (count, n))
    before = generator.multinomial(blanks, np.full(n, 1 / n), size=count).cumsum(1)
    inputs = np.full((count, setting.length), blank)
    np.put_along_axis(inputs, np.arange(n) + before, tokens, 1)
    inputs[:, n + blanks] = copy
    targets = np.full((count, setting.length), IGNORED)
    targets[:, -n:] = tokens
    return inputs, targets


_GENERATORS: dict[str, Callable[[Setting, bool, int, np.random.Generator], tuple[Ints, Ints]]] = {
    "compression": _compression,
    "fuzzy_recall": _fuzzy_recall,
    "in_context_recall": _in_context_recall,
    "memorization": _memorization,
    "noisy_recall": _in_context_recall,
    "selective_copy": _selective_copy,
}
