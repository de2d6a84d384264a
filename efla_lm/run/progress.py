"""What the user sees of a run: a banner at the start, then a live line on a terminal or plain lines elsewhere."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


def banner(title: str, facts: Mapping[str, object], *, main: bool = True, stream: TextIO | None = None) -> None:
    """Print what is about to run: `banner("efla-lm", {"model": ..., "parameters": ..., ...})`.

    It is a box on a terminal, and elsewhere one line `name: value` for each fact. Only the main process prints.
    """
    if not main:
        return
    stream = stream or sys.stdout
    console = _console(stream)
    if not console.is_terminal:
        width = max(len(name) for name in facts) + 1
        print(
            title,
            *(f"  {name + ':':<{width}} {value}" for name, value in facts.items()),
            sep="\n",
            file=stream,
            flush=True,
        )
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(str(value)))  # Text: brackets in a path are not markup
    console.print(Panel(table, title=title, title_align="left", expand=False))


class Progress:
    """Progress of a run of `total_steps` steps; a context manager.

    `update`, called after every step, refreshes the live line of a terminal. Elsewhere it prints a plain line if `log`
    is true. Only the main process prints.
    """

    def __init__(
        self, total_steps: int, *, start_step: int = 0, main: bool = True, stream: TextIO | None = None
    ) -> None:
        self.total_steps = total_steps
        self._stream = stream or sys.stdout
        self._main = main
        self._console = _console(self._stream)
        self._bar = ProgressBar(total=max(total_steps, 1), completed=start_step, width=30)
        self._validation = ""
        # (time, step) of recent steps: the ETA follows the present speed, not the average since the start
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)
        self._launched_at = start_step
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._main and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, *, loss: float, lr: float, tokens_per_second: float | None, log: bool = True) -> None:
        """Show that `step` steps are done. loss in nats per token; tokens_per_second None: not known yet."""
        if not self._main:
            return
        if step == self._launched_at + 3:
            self._recent.popleft()  # the first two steps of a launch compile and record CUDA graphs
        self._recent.append((time.monotonic(), step))
        speed = "?" if tokens_per_second is None else f"{tokens_per_second:,.0f}"
        text = (
            f"step {step}/{self.total_steps}  loss {loss:.4f}{self._validation}  lr {lr:.2e}  "
            f"{speed} tokens/s  ETA {self.eta()}"
        )
        if self._live is not None:
            self._bar.update(step)
            line = Table.grid(padding=(0, 1))
            line.add_row(self._bar, text)
            self._live.update(line)
            if log:
                self._console.print(text, style="dim", highlight=False)
        elif log:
            print(text, file=self._stream, flush=True)

    def measured(self, step: int, row: Mapping[str, float | None]) -> None:
        """Show a row of `Validation`: a validation loss, or metrics of tasks."""
        if "val_loss" in row:
            self.validated(step, row["val_loss"])
        else:
            self.evaluated(step, row)

    def validated(self, step: int, val_loss: float | None) -> None:
        """Show a validation loss (nats per token) and its perplexity; the next lines show the loss too. None: there is
        no loss, because the held-out data have no targets."""
        if val_loss is None:
            self.message(f"step {step}/{self.total_steps}  no validation loss: the held-out data have no targets")
            return
        self._validation = f"  val {val_loss:.4f}"
        perplexity = math.exp(val_loss) if val_loss < 700 else math.inf
        self.message(f"step {step}/{self.total_steps}  validation loss {val_loss:.4f}  perplexity {perplexity:,.2f}")

    def evaluated(self, step: int, scores: Mapping[str, float | None]) -> None:
        """Show metrics of tasks: `{"eval/piqa/acc": 0.53, ...}`."""
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in scores.items())
        self.message(f"step {step}/{self.total_steps}  evaluation: {shown}")

    def message(self, text: str) -> None:
        """Print one line above the live line."""
        if not self._main:
            return
        if self._live is not None:
            self._console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def eta(self) -> str:
        """Time left at the present speed, as 1:02:03; `?` before the second step of a launch."""
        if len(self._recent) < 2:
            return "?"
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        left = int((self.total_steps - s1) * (t1 - t0) / (s1 - s0))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"


def _console(stream: TextIO) -> Console:
    return Console(file=stream, force_terminal=None if stream.isatty() else False)
