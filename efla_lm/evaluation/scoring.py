"""Log-likelihood of continuations under a causal model.

The score of a continuation x after a context c is  sum_i log p(x_i | c, x_<i)  in nats, and whether every x_i is the
most probable token. Logits are reduced in fp32 (log-softmax) and summed in fp64. Rows are padded on the right: a causal
model needs no mask for it, and a row's score does not depend on the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from efla_lm.errors import UserError
from efla_lm.parallel.distributed import World

S = TypeVar("S")
T = TypeVar("T")
Pair = tuple[list[int], list[int]]
LOGIT_CHUNK = 1 << 25  # elements of fp32 logits that are reduced at once (128 MiB)
CPU_BATCH_TOKENS = 4096  # larger batches gain nothing on a CPU
GPU_BATCH_TOKENS = 131072


def windows(context: list[int], continuation: list[int], max_length: int) -> Iterator[Pair]:
    """Cut a pair into model inputs of at most `max_length` tokens: yields (inputs, targets).

    The targets are predicted at the last `len(targets)` positions of the inputs. Every token of the continuation is a
    target exactly once. If it fits into one window its context is cut from the left; if not, windows follow each other
    without overlap of their targets, and the last one is filled up with context from the left. With a context of one
    start token these are the rolling windows of lm-eval.
    """
    stream = context + continuation
    done = 0
    while done < len(continuation):
        take = min(max_length, len(continuation) - done)
        end = len(context) + done + take
        yield stream[max(0, end - 1 - max_length) : end - 1], stream[end - take : end]
        done += take


@dataclass
class _Row:
    """One model input and all targets asked of it: (window number, targets)."""

    inputs: tuple[int, ...]
    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def scored(self) -> int:
        return max(len(targets) for _, targets in self.asked)


class Scorer:
    """Scores token pairs with a causal language model.

    Args:
        model: any Hugging Face causal model, on its device, in evaluation mode.
        max_length: most tokens the model is given at once.
        batch_size: rows per batch, or `auto`: as many rows as fit into a number of tokens that depends on the free
            memory, halved whenever memory runs out.
        world: the processes that share the work; each returns all scores. None: this process alone.
        lockstep_tokens: for a model that is sharded over the processes. All make equally many forward passes together,
            of at most so many tokens (or one row), and do not halve a batch when memory runs out. None: each process
            has the whole model.
        check: called before each batch, in lockstep equally often on all processes; an exception ends the scoring.
    """

    def __init__(
        self,
        model: Any,
        max_length: int,
        batch_size: int | str = "auto",
        world: World | None = None,
        *,
        lockstep_tokens: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if batch_size != "auto" and (not isinstance(batch_size, int) or batch_size < 1):
            raise UserError(f"batch_size={batch_size}: expected a positive number of rows, or auto")
        if max_length < 1:
            raise UserError(f"context={max_length}: expected at least 1 token")
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.max_length = max_length
        self.batch_size = batch_size
        self.rank, self.world_size = (world.rank, world.size) if world else (0, 1)
        self._world, self._check = world, check
        accepted = inspect.signature(model.forward).parameters
        self._cuts_logits = "logits_to_keep" in accepted
        self._options = {"use_cache": False} if "use_cache" in accepted else {}
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.lockstep = lockstep_tokens is not None
        self.batch_tokens = lockstep_tokens or min(self.gather(self._first_budget()))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        return self._world.gather(value) if self._world else [value]

    def _first_budget(self) -> int:
        if self.device.type != "cuda":
            return CPU_BATCH_TOKENS
        free, _ = torch.cuda.mem_get_info(self.device)
        hidden = int(getattr(self.model.config, "hidden_size", 1024))
        per_token = 4 * self.vocab_size + 64 * hidden  # logits, and the widest few activations of a block
        return max(self.max_length, min(GPU_BATCH_TOKENS, free // (2 * per_token)))

    def score(self, pairs: Sequence[Pair], description: str = "scoring") -> list[tuple[float, bool]]:
        """(log-likelihood in nats, every token was the greedy choice) of each (context, continuation).

        An empty continuation scores (0.0, True). Equal inputs are computed once.

        Raises:
            UserError: an id lies outside the model's vocabulary, or one row alone exceeds the memory.
        """
        owners, rows = self._rows(pairs)
        batches = list(self._batches(rows))
        mine = batches[self.rank :: self.world_size]
        found: list[tuple[int, float, bool]] = []
        quiet = None if self.rank == 0 else True  # None: shown on a terminal only
        with tqdm(total=sum(map(len, mine)), desc=description, unit="row", disable=quiet, leave=False) as bar:
            for batch in mine:
                self._check()
                found.extend(self.in_parts(batch, self._forward, lambda row: len(row.inputs)))
                bar.update(len(batch))
        if self.lockstep and len(mine) < -(-len(batches) // self.world_size):
            self._check()
            self._idle_pass()
        totals = [0.0] * len(pairs)
        greedy = [True] * len(pairs)
        gathered = sorted(item for part in self.gather(found) for item in part)
        for window, total, is_greedy in gathered:
            totals[owners[window]] += total
            greedy[owners[window]] = greedy[owners[window]] and is_greedy
        return list(zip(totals, greedy))

    def _rows(self, pairs: Sequence[Pair]) -> tuple[list[int], list[_Row]]:
        owners: list[int] = []
        rows: dict[tuple[int, ...], _Row] = {}
        for number, (context, continuation) in enumerate(pairs):
            self._check_ids(context, continuation)
            for inputs, targets in windows(context, continuation, self.max_length):
                key = tuple(inputs)
                rows.setdefault(key, _Row(key)).asked.append((len(owners), targets))
                owners.append(number)
        return owners, sorted(rows.values(), key=lambda row: (-len(row.inputs), row.inputs))

    def _check_ids(self, context: list[int], continuation: list[int]) -> None:
        if not context:
            raise ValueError("expected at least one context token (the start token), got none")
        largest = max(max(context), max(continuation, default=0))
        if largest >= self.vocab_size:
            raise UserError(f"the tokenizer gives id {largest}, but the model has a vocabulary of {self.vocab_size}")

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Consecutive rows, longest first: padding is small, and if memory runs out, it does at the start."""
        start = 0
        while start < len(rows):
            length = len(rows[start].inputs)
            size = self.batch_size if isinstance(self.batch_size, int) else max(1, self.batch_tokens // length)
            yield rows[start : start + size]
            start += size

    def in_parts(self, items: list[S], work: Callable[[list[S]], list[T]], length: Callable[[S], int]) -> list[T]:
        """work(items); if memory runs out and the batch size is auto, work of both halves, and so on.

        length: tokens of an item; the first item is the longest. Raises UserError if halves are not allowed, or if one
        item alone exceeds the memory.
        """
        try:
            return work(items)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            tokens = length(items[0])
            if len(items) == 1:
                raise UserError(f"one row of {tokens} tokens exceeds the memory of {self.device}") from None
            if self.lockstep:  # the other processes wait in the same forward pass
                raise UserError(
                    f"evaluating {len(items)} rows of {tokens} tokens exceeds the memory of {self.device}: give "
                    "train.micro_tokens a smaller value, or evaluate after training with eval.py"
                ) from None
            if self.batch_size != "auto":
                raise UserError(
                    f"batch_size={self.batch_size} of {tokens} tokens exceeds the memory of {self.device}; use auto"
                ) from None
        # outside the handler, which keeps the tensors of the failed batch
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = (len(items) + 1) // 2
        return self.in_parts(items[:half], work, length) + self.in_parts(items[half:], work, length)

    @torch.no_grad()
    def _idle_pass(self) -> None:
        """Join the last forward pass of the other processes without a row to score."""
        self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), **self._options)

    @torch.no_grad()
    def _forward(self, rows: list[_Row]) -> list[tuple[int, float, bool]]:
        longest = len(rows[0].inputs)
        padded = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            padded[i, : len(row.inputs)] = torch.tensor(row.inputs)
        first = min(len(row.inputs) - row.scored for row in rows)  # the first position that is scored
        options: dict[str, Any] = dict(self._options)
        if self._cuts_logits:
            options["logits_to_keep"] = longest - first
        logits = self.model(input_ids=padded.to(self.device), **options).logits
        offset = longest - logits.shape[1]

        places: list[tuple[int, int]] = []  # (row, position) that is scored
        place_of: list[int] = []  # per target: index into `places`
        targets: list[int] = []
        window_of: list[int] = []
        for i, row in enumerate(rows):
            base = len(places)
            scored = row.scored
            places.extend((i, position - offset) for position in range(len(row.inputs) - scored, len(row.inputs)))
            for window, asked in row.asked:
                place_of.extend(range(base + scored - len(asked), base + scored))
                targets.extend(asked)
                window_of.extend([window] * len(asked))
        return reduce_logits(logits, places, place_of, targets, window_of)


def reduce_logits(
    logits: torch.Tensor, places: list[tuple[int, int]], place_of: list[int], targets: list[int], window_of: list[int]
) -> list[tuple[int, float, bool]]:
    """Sum of log-softmax at the targets, per window; one transfer from the device."""
    device = logits.device
    row, position = torch.tensor(places, device=device).T
    log_z = torch.empty(len(places), device=device)
    best = torch.empty(len(places), dtype=torch.long, device=device)
    step = max(1, LOGIT_CHUNK // logits.shape[-1])
    for start in range(0, len(places), step):
        part = logits[row[start : start + step], position[start : start + step]].float()
        log_z[start : start + step] = part.logsumexp(-1)
        best[start : start + step] = part.argmax(-1)
    place = torch.tensor(place_of, device=device)
    target = torch.tensor(targets, device=device)
    log_p = logits[row[place], position[place], target].float() - log_z[place]
    hit = best[place] == target
    both = torch.stack([log_p.double(), hit.double()]).cpu().numpy()
    numbers, inverse = np.unique(np.asarray(window_of), return_inverse=True)
    sums = np.bincount(inverse, weights=both[0])
    misses = np.bincount(inverse, weights=1.0 - both[1])
    return [(int(n), float(s), bool(m == 0)) for n, s, m in zip(numbers, sums, misses)]


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
