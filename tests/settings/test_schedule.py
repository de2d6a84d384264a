"""The learning rate is a function of tokens seen, exact at its three corners."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efla_lm.settings import ScheduleSettings
from efla_lm.training.schedule import describe, learning_rate

COSINE = ScheduleSettings(warmup_updates=10)
WSD = dataclasses.replace(COSINE, kind="wsd", decay_fraction=0.25)
CONSTANT = dataclasses.replace(COSINE, kind="constant", final=None)


def trace(schedule: ScheduleSettings, steps: int, batch: int) -> list[float]:
    return [learning_rate(schedule, step * batch, steps * batch, batch) for step in range(steps)]


def test_corners_of_40_updates():
    """3e-5 at update 0, the peak at update 10, 3e-5 at the last update (39), not one later."""
    rates = trace(COSINE, 40, 8192)
    assert (rates[0], rates[10], rates[39]) == (3e-5, 3e-4, 3e-5)
    assert rates[38] > 3e-5
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_against_the_formula_half_way():
    rates = trace(COSINE, 51, 100)  # x = (30 - 10) / (50 - 10) = 1/2 at update 30
    assert rates[30] == pytest.approx((3e-4 + 3e-5) / 2, rel=1e-12)
    assert rates[5] == pytest.approx((3e-4 + 3e-5) / 2, rel=1e-12)


def test_wsd_holds_then_falls_in_a_line():
    rates = trace(WSD, 101, 64)
    start = next(i for i in range(11, 101) if rates[i] < 3e-4)
    assert rates[10:start] == [3e-4] * (start - 10)
    assert start in (75, 76)  # a quarter of 101 updates before the last, update 100
    assert rates[-1] == 3e-5
    falls = [a - b for a, b in pairwise(rates[start:])]
    assert max(falls) == pytest.approx(min(falls), rel=1e-9)


def test_constant():
    rates = trace(CONSTANT, 40, 64)
    assert rates[0] == 3e-5 and set(rates[10:]) == {3e-4}


@pytest.mark.parametrize("schedule", [COSINE, WSD, CONSTANT])
def test_batch_size_does_not_matter_when_updates_are_given(schedule):
    """The same updates from 1 or 8 times the tokens: what changes with the number of processes must not enter."""
    assert trace(schedule, 40, 256) == trace(schedule, 40, 2048)


def test_warmup_in_tokens_equals_warmup_in_updates():
    in_tokens = dataclasses.replace(COSINE, warmup_updates=None, warmup_tokens=10 * 512)
    assert trace(in_tokens, 40, 512) == trace(COSINE, 40, 512)


@given(steps=st.integers(1, 300), warmup=st.integers(0, 400), batch=st.integers(1, 10**7), kind=st.integers(0, 2))
def test_bounds(steps, warmup, batch, kind):
    schedule = dataclasses.replace((COSINE, WSD, CONSTANT)[kind], warmup_updates=warmup)
    rates = trace(schedule, steps, batch)
    assert all(3e-5 <= rate <= 3e-4 for rate in rates)
    assert rates[0] == (3e-5 if warmup else 3e-4)
    if warmup < steps:
        assert rates[warmup] == 3e-4
    if warmup < steps - 1 and kind < 2:
        assert rates[-1] == 3e-5
    assert learning_rate(schedule, (steps + max(steps, warmup)) * batch, steps * batch, batch) in (3e-5, 3e-4)


def test_words_say_when_the_warmup_does_not_fit():
    assert "fills" not in describe(COSINE, 40 * 64, 64)
    assert "fills the whole run of 8 steps" in describe(COSINE, 8 * 64, 64)


@pytest.mark.parametrize(
    "broken",
    [
        dataclasses.replace(COSINE, kind="linear"),
        dataclasses.replace(COSINE, final=None),
        dataclasses.replace(WSD, decay_fraction=None),
        dataclasses.replace(COSINE, warmup_updates=None),
    ],
)
def test_incomplete_schedule_is_refused(broken):
    with pytest.raises(ValueError, match="expected"):
        learning_rate(broken, 100, 100, 1)


def test_negative_tokens_are_refused():
    with pytest.raises(ValueError, match="-1"):
        learning_rate(COSINE, -1, 100, 1)
