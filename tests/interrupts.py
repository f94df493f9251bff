"""Ctrl-C before any line of some modules, for tests of what it leaves behind."""

import sys
from collections import Counter


class CtrlC:
    """Counts the lines that are run in `files`, and interrupts before one of them.

    A signal is heard between two instructions, and after a long call more often than elsewhere:
    so also behind a BEGIN, where a `try` that would undo it may not have begun. Lines are as fine
    as `sys.settrace` has it.

    Args:
        files: of the modules in which to count.
        place: file and line before which to interrupt; None: nowhere.
        visit: which of the times that this line is run, from 1.
    """

    def __init__(self, files, place=None, visit=0):
        self.files = frozenset(files)
        self.place, self.visit = place, visit
        self.visits = Counter()

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            self.visits[place] += 1
            if place == self.place and self.visits[place] == self.visit:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
