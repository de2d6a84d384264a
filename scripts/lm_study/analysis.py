"""From the runs of the study to rates, paired differences and effects.

A difference is taken between two runs of one seed, which start from the same weights and see the same batches. Its
confidence interval is Student's, mean +- t_{0.975, n-1} s / sqrt(n) over n seeds: it says what another seed may change,
not what another corpus, size or token budget would.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Losses = dict[int, float]  # by seed; infinity for a run that diverged

# t_{0.975, n} of Student's distribution for n = 1, 2, ... degrees of freedom
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip
# (saturating gate, values over |k|) of the factorial's corners
CORNERS = {"deltanet": (0, 0), "efla_gate": (1, 0), "efla_value": (0, 1), "efla": (1, 1)}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the half width of its 95 % interval; None where one seed says nothing about others."""

    mean: float
    half: float | None
    count: int

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:+.4f} (one seed)"
        sign = "" if abs(self.mean) <= self.half else " *"
        return f"{self.mean:+.4f} ± {self.half:.4f}{sign}"


def estimate(values: Iterable[float]) -> Estimate:
    """The mean of paired differences and its interval. Raises ValueError for no values, or more than 16."""
    numbers = list(values)
    if not 0 < len(numbers) <= len(T_QUANTILES) + 1:
        raise ValueError(f"values: expected 1 to {len(T_QUANTILES) + 1}, got {len(numbers)}")
    if len(numbers) == 1:
        return Estimate(numbers[0], None, 1)
    t = T_QUANTILES[len(numbers) - 2]
    return Estimate(statistics.fmean(numbers), t * statistics.stdev(numbers) / math.sqrt(len(numbers)), len(numbers))


@dataclass(frozen=True)
class Study:
    """The finished runs as held-out losses by arm, rate and seed, and the grid that was planned."""

    arms: Sequence[str]
    rates: Sequence[float]
    sweep_seeds: Sequence[int]
    losses: dict[tuple[str, float], Losses]

    @classmethod
    def of(cls, content: dict[str, Any]) -> Study:
        """The study of a result file."""
        losses: dict[tuple[str, float], Losses] = {}
        for run in content["runs"]:
            if run["state"] in ("done", "diverged"):
                loss = run["heldout"] if run["heldout"] is not None else math.inf
                losses.setdefault((run["arm"], run["rate"]), {})[run["seed"]] = loss
        plan = content["plan"]
        return cls(plan["arms"], sorted(plan["rates"]), plan["seeds"][: plan["sweep_seeds"]], losses)

    def at(self, arm: str, rate: float) -> Losses:
        """Held-out losses by seed."""
        return self.losses.get((arm, rate), {})

    def swept(self, rate: float) -> bool:
        """Whether every arm has met this rate with every seed of the sweep."""
        return all(set(self.sweep_seeds) <= set(self.at(arm, rate)) for arm in self.arms)

    def compared_rates(self) -> list[float]:
        """Rates that every arm has met: the same number of trials for each of them."""
        return [rate for rate in self.rates if self.swept(rate)]

    def sweep_loss(self, arm: str, rate: float) -> float:
        """Mean over the sweep's seeds."""
        return statistics.fmean(self.at(arm, rate)[seed] for seed in self.sweep_seeds)

    def best_rate(self, arm: str) -> float | None:
        """The compared rate of the lowest held-out loss over the sweep's seeds; None where there is none, or no run
        at any of them stayed finite."""
        rates = [rate for rate in self.compared_rates() if math.isfinite(self.sweep_loss(arm, rate))]
        return min(rates, key=lambda rate: self.sweep_loss(arm, rate), default=None)

    def kept_rates(self) -> list[float]:
        """Rates that are best for some arm: the ones at which the further seeds train every arm."""
        return sorted({rate for arm in self.arms if (rate := self.best_rate(arm)) is not None})

    def warnings(self) -> list[str]:
        """What a reader must know before the tables: unmet rates, best rates at the edge of the grid."""
        compared, found = self.compared_rates(), []
        if missing := [f"{rate:g}" for rate in self.rates if rate not in compared]:
            found.append(f"not every arm has been trained at {', '.join(missing)}: these rates are left out")
        for arm in self.arms:
            best = self.best_rate(arm)
            if best is None and compared:
                found.append(f"{arm}: no rate gave a finite loss")
            elif best is not None and best in (self.rates[0], self.rates[-1]):
                end = "lowest" if best == self.rates[0] else "highest"
                found.append(f"{arm}: its best rate {best:g} is the {end} of the grid; add rates beyond it")
        return found


def paired(first: Losses, second: Losses) -> list[float]:
    """first - second for each seed that both have, where both are finite."""
    seeds = [seed for seed in first if seed in second]
    return [first[s] - second[s] for s in seeds if math.isfinite(first[s]) and math.isfinite(second[s])]


def effects(losses: Mapping[str, Losses]) -> dict[str, Estimate]:
    """Main effects of the gate and of the values' scale on the held-out loss, and their interaction, over seeds.

        gate   = ((L_gate - L_delta) + (L_efla - L_value)) / 2
        values = ((L_value - L_delta) + (L_efla - L_gate)) / 2
        interaction = L_efla - L_gate - L_value + L_delta

    losses: those of each corner by its name. Empty where no seed has four finite corners.
    """
    corner = {place: losses[arm] for arm, place in CORNERS.items()}
    seeds = [s for s in corner[0, 0] if all(s in x and math.isfinite(x[s]) for x in corner.values())]
    if not seeds:
        return {}
    signs = {
        "gate": lambda g, v: (2 * g - 1) / 2,
        "values": lambda g, v: (2 * v - 1) / 2,
        "interaction": lambda g, v: (2 * g - 1) * (2 * v - 1),
    }
    return {
        name: estimate(sum(sign(*place) * x[seed] for place, x in corner.items()) for seed in seeds)
        for name, sign in signs.items()
    }
