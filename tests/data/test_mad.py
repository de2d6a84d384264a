"""Each rule of the MAD tasks, read from the sequences themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from efla_data.errors import DataError
from efla_data.tasks.mad import BASELINES, IGNORED, fixed_mapping, generate, settings_of

EXAMPLES = 200


def pairs_of(inputs: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(inputs[0::2].tolist(), inputs[1::2].tolist()))


@pytest.mark.parametrize("task", BASELINES)
def test_sizes_ids_seeds_and_streams(task: str) -> None:
    for setting in settings_of(task):
        for split in ("train", "test"):
            inputs, targets = generate(setting, split, 8)
            assert inputs.shape == targets.shape and inputs.shape[0] == 8
            # a recall sequence of T tokens is T - 1 predictions of the next one
            assert inputs.shape[1] == setting.length - (task in ("in_context_recall", "noisy_recall"))
            assert inputs.min() >= 0 and inputs.max() < setting.vocab_size
            assert set(targets[targets < 0]) <= {IGNORED} and targets.max() < setting.vocab_size
    base = BASELINES[task]
    again = generate(base, "train", 16)
    assert all(np.array_equal(a, b) for a, b in zip(again, generate(base, "train", 16)))
    assert not np.array_equal(again[0], generate(base, "test", 16)[0])
    assert not np.array_equal(again[0], generate(base, "train", 16, seed=1)[0])


def test_settings_are_the_benchmarks() -> None:
    counts = {task: len(settings_of(task)) for task in BASELINES}
    assert counts == {
        "compression": 11,
        "fuzzy_recall": 11,
        "in_context_recall": 11,
        "memorization": 6,
        "noisy_recall": 14,
        "selective_copy": 13,
    }
    with pytest.raises(DataError, match="compression"):
        settings_of("recall")


@pytest.mark.parametrize("task", ["in_context_recall", "noisy_recall"])
def test_recall_is_determined_by_the_prefix(task: str) -> None:
    setting = replace(BASELINES[task], noise=0.5) if task == "noisy_recall" else BASELINES[task]
    inputs, targets = generate(setting, "test", EXAMPLES)
    usable = setting.vocab_size - setting.noise_vocab
    asked = noisy = 0
    for row, wanted in zip(inputs, targets):
        seen: dict[int, int] = {}
        for place, token in enumerate(row):
            is_key = place % 2 == 0 and token < usable
            if not is_key:
                assert wanted[place] == IGNORED
                noisy += token >= usable
                continue
            assert token < usable // 2
            if token in seen:
                assert wanted[place] == seen[token]  # the answer is in the prefix, and every such question is asked
                asked += 1
            else:
                assert wanted[place] == IGNORED
            if place + 1 < len(row):
                value = row[place + 1]
                assert usable // 2 <= value < usable
                assert seen.setdefault(token, value) == value
        assert wanted[-1] != IGNORED  # the last key has been seen
    assert asked > EXAMPLES * 10
    share = noisy / (inputs.shape[0] * (inputs.shape[1] - 1))
    assert share == pytest.approx(setting.noise, abs=0.03)


def test_recall_trains_on_every_next_token() -> None:
    for task in ("in_context_recall", "noisy_recall", "fuzzy_recall"):
        inputs, targets = generate(BASELINES[task], "train", 50)
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_recall_mapping_changes_between_sequences() -> None:
    inputs, _ = generate(BASELINES["in_context_recall"], "test", 50)
    values = {value for row in inputs for key, value in pairs_of(row[:-1]) if key == 0}
    assert len(values) > 4


def read_fuzzy(row: np.ndarray, usable: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Runs of key tokens followed by runs of value tokens."""
    keys = usable // 2
    pairs: list[tuple[list[int], list[int]]] = []
    for token in row:
        if token >= usable:
            continue
        if token < keys:
            if not pairs or pairs[-1][1]:
                pairs.append(([], []))
            pairs[-1][0].append(int(token))
        else:
            pairs[-1][1].append(int(token))
    return [(tuple(k), tuple(v)) for k, v in pairs]


def test_fuzzy_recall_keys_values_and_questions() -> None:
    setting = BASELINES["fuzzy_recall"]
    inputs, targets = generate(setting, "test", EXAMPLES)
    usable = setting.vocab_size - 1
    for row, wanted in zip(inputs, targets):
        last = wanted[-1]
        whole = np.append(row, last)
        pairs = read_fuzzy(whole, usable)
        seen: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected: list[int] = []
        for key, value in pairs:
            assert len(key) == 3 and len(set(key)) == 3  # tests ask at the longest key
            assert 1 <= len(value) <= 3 and len(set(value)) == len(value)
            expected += [IGNORED] * 3 + (list(value) if key in seen else [IGNORED] * len(value))
            assert seen.setdefault(key, value) == value
        assert np.array_equal(wanted[-len(expected) + 1 :], expected[1:])
        assert pairs[-1][0] in [key for key, _ in pairs[:-1]]  # the last question repeats a pair
        padding = len(whole) - len(expected)
        assert (whole[:padding] == setting.vocab_size - 1).all()  # on the left
        assert padding <= 2 * setting.motif + 1


def test_fuzzy_training_has_motifs_of_every_length() -> None:
    inputs, _ = generate(BASELINES["fuzzy_recall"], "train", EXAMPLES)
    pairs = [pair for row in inputs for pair in read_fuzzy(row, 15)[:-1]]
    assert {len(key) for key, _ in pairs} == {len(value) for _, value in pairs} == {1, 2, 3}


def test_memorization_has_one_mapping_for_all() -> None:
    setting = BASELINES["memorization"]
    mapping = fixed_mapping(setting.vocab_size)
    assert len(set(mapping.tolist())) == len(mapping) == 127
    assert mapping.min() >= 127 and mapping.max() < 255
    for split in ("train", "test"):
        inputs, targets = generate(setting, split, EXAMPLES)
        assert (inputs[:, 1::2] == setting.vocab_size - 1).all()  # the value is not in the input
        assert (targets[:, 0::2] == IGNORED).all()
        assert np.array_equal(targets[:, 1::2], mapping[inputs[:, 0::2]])


def test_compression_asks_for_the_input() -> None:
    setting = BASELINES["compression"]
    inputs, targets = generate(setting, "test", EXAMPLES)
    assert np.array_equal(inputs, targets)
    assert (inputs[:, -1] == setting.vocab_size - 1).all() and inputs[:, :-1].max() == setting.vocab_size - 2


@pytest.mark.parametrize("copies", [16, 96])
def test_selective_copy_keeps_the_order(copies: int) -> None:
    setting = replace(BASELINES["selective_copy"], copies=copies)
    inputs, targets = generate(setting, "train", EXAMPLES)
    blank, copy = setting.vocab_size - 2, setting.vocab_size - 1
    gaps = []
    for row, wanted in zip(inputs, targets):
        assert (row == copy).sum() == 1 and row[-copies - 1] == copy
        assert (row[-copies:] == blank).all()
        data = row[: -copies - 1]
        assert np.array_equal(data[data < blank], wanted[-copies:])
        assert (wanted[:-copies] == IGNORED).all()
        gaps.append(int((data[: len(data) // 2] < blank).sum()))
    assert len(set(gaps)) > 3  # blanks fall anywhere
    with pytest.raises(DataError, match="length"):
        generate(replace(setting, length=2 * copies + 1), "train", 2)
