"""One display in a notebook that is updated, where a terminal has a block that is redrawn.

A NotebookCell is the file that a console prints to and, with the methods of rich's Live, the block
beneath it. What is printed stays; the block goes when it is stopped. All is text, and escaped.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from typing import Any, Protocol

from rich.console import Console as Terminal
from rich.console import RenderableType

_WIDTH = 110
_REDRAW_S = 0.5


class _Display(Protocol):
    def update(self, data: Mapping[str, str], raw: bool) -> None: ...


Open = Callable[[Mapping[str, str]], _Display]


class NotebookCell(io.StringIO):
    """The output of a notebook's cell. `show` opens a display; each later picture updates it."""

    def __init__(self, show: Open, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._show = show
        self._clock = clock
        self._block = ""
        self._display: _Display | None = None
        self._drawn = -_REDRAW_S

    def terminal(self, *, quiet: bool = False) -> Terminal:
        """What prints into it."""
        return Terminal(
            file=self,
            width=_WIDTH,
            quiet=quiet,
            highlight=False,
            soft_wrap=True,
            force_terminal=False,
            force_jupyter=False,
            color_system=None,
        )

    def flush(self) -> None:
        """Something was printed."""
        self._draw()

    def start(self) -> None:
        """The block begins."""

    def update(self, block: RenderableType, *, refresh: bool = False) -> None:
        """Another picture of it; at most two a second, unless it must be now."""
        if not refresh and self._clock() - self._drawn < _REDRAW_S:
            return
        drawn = io.StringIO()
        Terminal(file=drawn, width=_WIDTH, force_jupyter=False, color_system=None).print(block)
        self._block = drawn.getvalue()
        self._draw()

    def stop(self) -> None:
        """The block ends."""
        self._block = ""
        self._draw()

    def _draw(self) -> None:
        self._drawn = self._clock()
        text = (self.getvalue() + self._block).rstrip("\n")
        picture = {"text/html": f"<pre>{escape(text)}</pre>", "text/plain": text}
        if self._display is None:
            self._display = self._show(picture)
        else:
            self._display.update(picture, raw=True)


def terminal_of(cell: NotebookCell | None, quiet: bool) -> Terminal:
    """What prints into the cell; to standard output where there is none."""
    if cell is not None:
        return cell.terminal(quiet=quiet)
    return _Output(quiet=quiet, highlight=False, soft_wrap=True)


class _Output(Terminal):
    """Standard output. If it cannot be written, training goes on without it.

    rich ends the process if nobody reads it, and fails if its disk is full, its terminal is gone,
    or its encoding lacks a letter.
    """

    _told = False

    @property
    def encoding(self) -> str:
        """Of standard output, where rich takes utf-8 for granted; lines are drawn as it can."""
        return (getattr(self.file, "encoding", None) or "utf-8").lower()

    def on_broken_pipe(self) -> None:
        """Nobody ever reads it again."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes it at its end
        os.close(nowhere)
        self._tell("nobody reads the output any more")

    def __exit__(self, *raised: object) -> None:
        """Where rich writes all that was printed since `__enter__`. There may be room later."""
        try:
            super().__exit__(*raised)
        except UnicodeEncodeError:  # of the name of a run or a metric, or of a traceback
            if isinstance(self.file, io.TextIOWrapper):
                self.file.reconfigure(errors="replace")
            else:
                self._forget()
            with self:  # which writes it now
                pass
        except OSError as error:
            self._forget()
            self._tell(f"the output cannot be written ({error.strerror})")

    def _forget(self) -> None:
        """What could not be written."""
        self.quiet = True
        with self:
            pass
        self.quiet = False

    def _tell(self, what: str) -> None:
        """Once, where somebody may still read."""
        if not self._told:
            self._told = True
            with suppress(OSError):
                sys.stderr.write(f"elastix: {what}; the run goes on\n")


def here() -> NotebookCell | None:
    """For the cell that is being run; None outside of a notebook."""
    if not Terminal().is_jupyter:
        return None
    import IPython.display as notebook  # there is one, so there is IPython

    display: Any = notebook.display
    return NotebookCell(lambda picture: display(picture, raw=True, display_id=True))
