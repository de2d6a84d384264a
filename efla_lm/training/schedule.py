r"""The learning rate as a pure function of the tokens seen.

Let N be the number of steps and b the tokens of one, so that step i (from 0) is taken at t = i b tokens and the last
one at L = (N - 1) b. With w the length of the warm-up in tokens:

    lr(t) = initial + (peak - initial) t / w                             t < w
    cosine:    final + (peak - final) (1 + cos(pi x)) / 2,  x = (t - w) / (L - w)
    wsd:       peak until L - d, then a straight line to final at L,  d = decay_fraction N b, at most L - w
    constant:  peak

so that lr(0) = initial, lr(w) = peak and lr(L) = final, exactly. Rates are per step.
"""

import math

from efla_lm.settings import ScheduleSettings


def learning_rate(schedule: ScheduleSettings, tokens_seen: int, total_tokens: int, batch_tokens: int) -> float:
    """The rate of the step that is taken after `tokens_seen` tokens, in a run of `total_tokens`.

    It does not depend on the number of processes. After the end it stays at the final rate. A warm-up longer than the
    run ends with the run (`describe` says so). Raises ValueError for negative tokens.
    """
    if tokens_seen < 0:
        raise ValueError(f"tokens_seen: got {tokens_seen}, expected 0 or more")
    warmup, last = warmup_tokens(schedule, batch_tokens), total_tokens - batch_tokens
    if tokens_seen < warmup:
        return _line(schedule.initial, schedule.peak, tokens_seen / warmup)
    if schedule.kind == "constant":
        return schedule.peak
    if schedule.final is None:
        raise ValueError(f"schedule.final: got null, expected a number for kind {schedule.kind}")
    if schedule.kind == "cosine":
        x = _progress(tokens_seen, warmup, last)
        return _line(schedule.final, schedule.peak, (1 + math.cos(math.pi * x)) / 2)
    if schedule.kind == "wsd":
        if schedule.decay_fraction is None:
            raise ValueError("schedule.decay_fraction: got null, expected a number for kind wsd")
        start = max(warmup, last - schedule.decay_fraction * total_tokens)
        return _line(schedule.peak, schedule.final, _progress(tokens_seen, start, last))
    raise ValueError(f"schedule.kind: got {schedule.kind!r}, expected cosine, wsd or constant")


def warmup_tokens(schedule: ScheduleSettings, batch_tokens: int) -> int:
    """The length of the warm-up in tokens; the settings give it in tokens or in steps."""
    if schedule.warmup_tokens is not None:
        return schedule.warmup_tokens
    if schedule.warmup_updates is not None:
        return schedule.warmup_updates * batch_tokens
    raise ValueError("schedule: expected warmup_updates or warmup_tokens, got neither")


def describe(schedule: ScheduleSettings, total_tokens: int, batch_tokens: int) -> str:
    """One line for the banner; it also says if the warm-up does not fit into the run."""
    warmup, steps = warmup_tokens(schedule, batch_tokens) / batch_tokens, total_tokens // batch_tokens
    text = f"{schedule.kind}, {schedule.initial:g} to {schedule.peak:g} over {warmup:g} steps"
    if schedule.final is not None:
        text += f", {schedule.final:g} at the last of {steps}"
    if warmup >= steps - 1 and warmup > 0:
        text += f" (but the warm-up fills the whole run of {steps} steps)"
    return text


def _line(start: float, end: float, x: float) -> float:
    """Exactly `start` at x = 0 and `end` at x = 1."""
    return (1 - x) * start + x * end


def _progress(tokens: int, start: float, end: float) -> float:
    """Share of the way from start to end, in [0, 1]."""
    return 1.0 if tokens >= end and tokens > start else 0.0 if tokens <= start else (tokens - start) / (end - start)
