"""The terminal output of commands while they run."""

import contextlib
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxshare import progress
from jaxshare.serving.workers.text.transcript import Event

_FRAME = 4


class Streams:
    """The workers' texts side by side: live on a terminal, printed once at the end elsewhere."""

    def __init__(self, names: Sequence[str], console: Console):
        self.texts, self.console = dict.fromkeys(names, ""), console
        self.live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self._lines = contextlib.ExitStack()

    def __enter__(self) -> "Streams":
        if self.live:
            self._lines.enter_context(progress.DISPLAY.lines())
            self.live.start()
        return self

    def show(self, event: Event) -> None:
        """Appends an event's text to what its worker has written."""
        self.texts[event.worker] = self.texts.get(event.worker, "") + event.text
        if self.live:
            self.live.update(self._view(self.console.height - _FRAME), refresh=True)

    def _view(self, lines: int | None = None) -> Table:
        """One panel for each worker, with the last `lines` of its text or all of it."""
        grid = Table.grid(expand=True)
        columns = len(self.texts)
        for _ in range(columns):
            grid.add_column(ratio=1)
        width = self.console.width // columns - _FRAME
        panels = []
        for name, text in self.texts.items():
            wrapped = Text(text.strip()).wrap(self.console, max(width, 1))
            shown = wrapped if lines is None else wrapped[-max(lines, 1) :]
            panels.append(Panel(Text("\n").join(shown), title=Text(name), title_align="left"))
        grid.add_row(*panels)
        return grid

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()
        self._lines.close()
        self.console.print(self._view())


def console_for(json: bool) -> Console:
    """The console for pictures: stdout, or stderr where stdout is for JSON."""
    return Console(
        file=sys.stderr if json else sys.stdout, width=None if sys.stdout.isatty() else 112
    )
