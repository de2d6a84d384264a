"""How often units are gone over until the documents that stay reach the token budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from efla_data.corpus.progress import Progress, Watcher
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.schedule import HeadQueue, Queue, SampleQueue, cut_at_goal, run_queue
from efla_data.corpus.selection import Selection, select
from efla_data.corpus.sources import Piece
from efla_data.corpus.unit import EVERY_HASH, UnitResult


def tokenise(
    folder: Path,
    recipe: Recipe,
    units: list[list[Piece]],
    processes: int,
    show: Callable[[Progress], None] | None,
) -> tuple[dict[int, UnitResult], Selection | None]:
    """Process the units that are needed and not yet done: the results that count, by unit, and what stays of them.

    The selection is None where all documents of these units stay. The outcome does not depend on who was how fast.
    """

    def watcher(budget: int | None = None) -> Watcher:
        return Watcher([sum(piece.bytes for piece in unit) for unit in units], budget, show)

    if recipe.max_tokens is None:
        queue = Queue(folder, units, watcher())
        run_queue(queue, processes)
        counted = queue.training
    elif recipe.sample == "documents":
        return _sample(folder, recipe, units, processes, watcher, recipe.max_tokens)
    elif recipe.deduplicate:
        return _head_of_distinct(folder, recipe, units, processes, watcher, recipe.max_tokens)
    else:
        queue = HeadQueue(folder, units, watcher(recipe.max_tokens), recipe.max_tokens, cut=True)
        run_queue(queue, processes)
        cut_at_goal(queue)
        counted = queue.training[: queue.count]
    results = {unit: queue.results[unit] for unit in counted + queue.heldout}
    return results, select(folder, recipe, counted, queue.heldout, results) if recipe.keeps_keys else None


def _head_of_distinct(
    folder: Path,
    recipe: Recipe,
    units: list[list[Piece]],
    processes: int,
    watcher: Callable[[int | None], Watcher],
    budget: int,
) -> tuple[dict[int, UnitResult], Selection]:
    """Further units while what is left without duplicates falls short of the budget."""
    goal = budget
    while True:
        queue = HeadQueue(folder, units, watcher(goal), goal, cut=False)
        run_queue(queue, processes)
        queue.enough()
        counted = queue.training[: queue.count]
        results = {unit: queue.results[unit] for unit in counted + queue.heldout}
        selection = select(folder, recipe, counted, queue.heldout, results)
        missing = budget - selection.train_tokens()
        if missing <= 0 or queue.count == len(queue.training):
            return results, selection
        goal = queue.tokens + missing


def _sample(
    folder: Path,
    recipe: Recipe,
    units: list[list[Piece]],
    processes: int,
    watcher: Callable[[int | None], Watcher],
    budget: int,
) -> tuple[dict[int, UnitResult], Selection]:
    """Once more over the units, up to a higher bound, where the first estimate fell short."""
    least = None
    while True:
        queue = SampleQueue(folder, units, watcher(None), budget, least)
        run_queue(queue, processes)
        selection = select(folder, recipe, queue.training, queue.heldout, queue.results)
        found, bound = selection.train_tokens(), min(queue.results[unit].below for unit in queue.training)
        if found >= budget or bound == EVERY_HASH:
            return queue.results, selection
        least = min(EVERY_HASH, bound * 2 if not found else int(bound * max(1.2, 1.1 * budget / found)))
