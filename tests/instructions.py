"""Counts the instructions that Python executes: a cost without a clock, equal on all machines."""

import sys
import threading
from collections.abc import Callable


def instructions(work: Callable[[], object]) -> int:
    """How many `work` executes in this thread, also in what it calls.

    Of Python 3.12 on a tracer is told of none in code that runs for the first time, and in 3.13 of
    hardly any; what they have for that is `sys.monitoring`.
    """
    return _monitored(work) if sys.version_info >= (3, 12) else _traced(work)


def _monitored(work: Callable[[], object]) -> int:
    monitoring, here, count = sys.monitoring, threading.get_ident(), 0
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION

    def one(_code: object, _offset: int) -> None:
        nonlocal count
        count += threading.get_ident() == here

    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, event, one)
    monitoring.set_events(tool, event)
    try:
        work()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def _traced(work: Callable[[], object]) -> int:
    count = 0

    def each(frame, event, _arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
