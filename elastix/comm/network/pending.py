"""An operation under way in a process group, whoever carries it."""

from collections.abc import Callable
from typing import Any

import torch


class Pending:
    """An operation under way. `finished` never blocks; `settle` says how it ended.

    Attributes:
        norm: when it is over, that of the result where it was had on the way; else None.
    """

    norm: float | None = None

    def __init__(self, work: Any, error: BaseException | None = None) -> None:  # noqa: ANN401
        self._work = work
        self._error = error
        # The future is done before the work says so, and its callbacks run in between.
        self._future = work.get_future() if error is None else None

    def finished(self) -> bool:
        """Whether it is over, well or not."""
        return self._future is None or bool(self._future.done())

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back from another thread when it is over; at once if it is."""
        if self._future is None:
            callback()
        else:
            self._future.add_done_callback(lambda _future: callback())

    def settle(self) -> BaseException | None:
        """After `finished`: order the current CUDA stream after it, or say why it failed.

        Raises:
            torch.AcceleratorError: the device of this process fails.
        """
        if isinstance(self._error, torch.AcceleratorError):
            raise self._error
        if self._error is None:
            try:
                self._order()
            except torch.AcceleratorError:  # the device fails, and not a peer
                raise
            except RuntimeError as error:
                self._error = bare(error)
        return self._error

    def _order(self) -> None:
        self._work.wait()

    @property
    def writes(self) -> bool:
        """Whether memory of it may still be written to."""
        return not self.finished()

    def let_go(self) -> bool:
        """Of a group that was abandoned: whether nothing writes to the tensor any more."""
        return self.finished() and self.settle() is None


def bare(error: Exception) -> Exception:
    """Without its traceback, whose frames would keep the group and its sockets until gc."""
    return error.with_traceback(None)
