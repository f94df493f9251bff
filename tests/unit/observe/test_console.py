"""The console: a block of at most 12 lines on a terminal, lines in a log, first failures last."""

import errno
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from elastix.__main__ import _open_what_is_closed
from elastix.commands.runs import _took
from elastix.errors import QuorumLost, WorkerFailed
from elastix.events import (
    GenerationFormed,
    Reported,
    Resumed,
    SlicesHandedOver,
    WorkerLost,
    WorkerRaised,
)
from elastix.observe import catalogue
from elastix.observe.console import Console, group_line
from elastix.observe.event_text import line, plain
from elastix.observe.journal import Journal
from elastix.observe.notebook_cell import terminal_of
from elastix.observe.progress import Progress
from tests.report_data import BEGAN, run_events


class Clock:
    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> float:
        return self.now


def console_of(tty: bool, width: int = 100) -> tuple[Console, io.StringIO, Clock]:
    file = io.StringIO()
    terminal = Terminal(
        file=file,
        force_terminal=tty,
        width=width,
        height=40,
        highlight=False,
        soft_wrap=not tty,
        legacy_windows=False,
    )
    clock = Clock()
    return Console("digits", "runs/store", terminal=terminal, clock=clock), file, clock


def play(console: Console, clock: Clock, events) -> None:
    for event in events:
        clock.now = event.t
        console.show(event)


@pytest.mark.parametrize("width", [30, 60, 100, 200])
def test_the_block_never_has_more_than_twelve_lines(width):
    console, _, clock = console_of(tty=True, width=width)
    heights = set()
    for number, event in enumerate(run_events(steps=300, kill_every=60)):
        clock.now = event.t
        console.show(event)
        if number % 7:
            continue
        shown = console._terminal.render_lines(console._block())
        heights.add(len(shown))
        assert all(sum(segment.cell_length for segment in row) <= width for row in shown)
    assert max(heights) <= 12


def test_the_block_says_what_matters():
    console, file, clock = console_of(tty=True, width=160)
    with console:
        play(console, clock, run_events(steps=300, ended=False))
        console._terminal.file = file = io.StringIO()
        console._terminal.print(console._block())
    text = file.getvalue()
    for part in (
        "digits",
        "step 300",
        "epoch 12 of 12",
        "workers 8/8",
        "goodput ",
        "last loss: rank ",
        " died, recovered in 0.",
        "0 steps lost",
        "samples/s",
        "0:00 left",
        "accuracy 0.",
        "worker 8 joined",
    ):
        assert part in text, part


def test_nothing_of_the_block_is_left_when_the_run_is_over():
    console, file, clock = console_of(tty=True)
    with console:
        play(console, clock, run_events(steps=50))
        console.finished("a" * 64, {"accuracy": 0.5}, "exact")
    last = file.getvalue().rsplit("\x1b[2K", 1)[1]  # what stands after the last erased line
    assert "digits finished" in last
    assert "group" not in last


def test_a_log_has_a_line_per_event_and_a_summary_each_half_minute():
    console, file, clock = console_of(tty=False)
    with console:
        play(console, clock, run_events(steps=1200, kill_every=500, step_s=0.12))
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    took = clock.now - BEGAN
    summaries = [text for text in lines if "goodput" in text]
    assert took // 30 - 1 <= len(summaries) <= took // 30
    assert sum(" lost (rank" in text for text in lines) == 2
    assert sum("recovered step" in text for text in lines) == 2  # not one per survivor
    assert sum("joined after step" in text for text in lines) == 2


def test_lines_count_from_where_the_report_and_the_last_line_count():
    """Ray and processes take seconds, in which the run has begun and is told of nowhere."""
    console, file, clock = console_of(tty=False)
    clock.now += 9.6
    console._started = clock.now
    play(console, clock, run_events(steps=20))
    console.finished("a" * 64, {}, "")
    formed = next(one for one in file.getvalue().splitlines() if "generation 1" in one)
    assert formed.split()[0] == "3.20"  # eight workers, each of which took 0.4 s


def test_a_summary_comes_even_if_nothing_happens():
    console, file, clock = console_of(tty=False)
    with console:
        play(console, clock, run_events(steps=20, ended=False))
        before = len(file.getvalue().splitlines())
        clock.now += 31
        console.tick()
        clock.now += 5
        console.tick()
    assert len(file.getvalue().splitlines()) == before + 1


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_took_what_elastix_runs_says_that_it_took(failed, tmp_path):
    """Up to one second around a minute's end: it is rounded there, and began before its journal."""
    for number in range(12):
        events = list(run_events(steps=300, step_s=0.2 + number / 300))
        console, file, clock = console_of(tty=False, width=200)
        clock.now -= 2.4  # Ray is started
        console._started = clock.now
        play(console, clock, events)
        clock.now += 1.7  # processes are ended
        if failed:
            console.failed(WorkerFailed("too bad"))
        else:
            console.finished("a" * 64, {}, "")
        name = f"digits{number}"
        (tmp_path / "runs" / name).mkdir(parents=True)
        with Journal(tmp_path / "runs" / name / "journal.jsonl") as journal:
            for event in events:
                journal.append(event)
        took = _took(catalogue.summary(tmp_path, name))
        assert (f"after step 300, {took}" if failed else f"300 steps in {took} ") in file.getvalue()


@pytest.mark.parametrize("end", ["finished", "over"])
def test_what_was_proven_has_a_line_for_each_law(end):
    console, file, _ = console_of(False, width=200)
    getattr(console, end)("a" * 64, {}, "samples exact: 8 steps\nreplicas equal: compared once")
    lines = file.getvalue().splitlines()
    assert "  samples exact: 8 steps" in lines
    assert "  replicas equal: compared once" in lines


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize("end", ["finished", "failed", "interrupted"])
def test_first_and_last_line_name_the_run_the_store_and_the_report(tty, end):
    console, file, _ = console_of(tty, width=200)
    with console:
        first = file.getvalue().splitlines()[0]
        if end == "finished":
            console.finished("a" * 64, {}, "exact")
        elif end == "failed":
            console.failed(QuorumLost("too few"))
        else:
            console.interrupted()
    last = file.getvalue().splitlines()[-1]
    for text in (first, last):
        assert "runs/store" in text
        assert "elastix report digits --store runs/store" in text
    assert "digits" in first


@pytest.mark.parametrize("tty", [True, False])
def test_the_first_failure_stands_at_the_end(tty):
    console, file, clock = console_of(tty)
    with console:
        for worker, what in ((2, "the cause"), (0, "a symptom")):
            text = f"Traceback:\n  File x.py\nValueError: {what}"
            raised = WorkerRaised(t=clock.now, worker=worker, rank=1, step=7, traceback=text)
            console.show(raised)
        console.failed(WorkerFailed("the train function raised ValueError: a symptom"))
    end = file.getvalue().split("digits failed", 1)[1]
    assert "ValueError: the cause" in end
    assert "a symptom" not in end
    assert "worker 2, rank 1, after step 7" in end


def test_a_run_that_goes_on_recovers_from_no_loss_of_before():
    """When a driver is killed its workers die, some of them before the journal ends."""
    before, *_ = events = list(run_events(steps=60, kill_every=50, ended=False))
    progress = Progress()
    for event in events:
        progress.add(event)
    assert "last loss" in group_line(progress)
    progress.add(replace(before, t=events[-1].t + 60))
    assert "workers 0/8, starting" in group_line(progress)
    formed = GenerationFormed(t=events[-1].t + 65, generation=9, members=(7, 8), cause="start")
    progress.add(formed)
    assert "gen 9   workers 2/8" in group_line(progress)
    assert "last loss" not in group_line(progress)


def test_the_last_line_of_an_error_of_many_is_shown_without_its_tab():
    console, file, clock = console_of(tty=False)
    with console:
        text = "Traceback:\nRuntimeError: it does not fit:\n\tsize mismatch for bias"
        console.show(WorkerRaised(t=clock.now, worker=0, rank=0, step=3, traceback=text))
        console.show(Resumed(t=clock.now, step=0, ref=""))
        console.show(Resumed(t=clock.now, step=7, ref="ab"))
    told = file.getvalue()
    assert "rank 0, after step 3: size mismatch for bias" in told
    assert "begins anew: no State was stored" in told
    assert "goes on from the State after step 7" in told
    assert "after step 0" not in told


def test_a_worker_outside_of_the_group_has_no_rank():
    console, file, clock = console_of(tty=False)
    with console:
        console.show(WorkerRaised(t=clock.now, worker=2, rank=-1, step=0, traceback="KeyError: 1"))
        console.failed(WorkerFailed("the train function raised KeyError: 1"))
    assert "first failure: worker 2, before it joined the group" in file.getvalue()
    console, file, clock = console_of(tty=False)
    with console:
        lost = WorkerLost(t=clock.now, worker=3, rank=-1, generation=0, cause="died")
        console.show(lost)
        console.failed(QuorumLost("no worker is left."))
    assert "first failure: worker 3 (not in the group yet) died" in file.getvalue()
    assert "rank -1" not in file.getvalue()


def test_without_a_traceback_the_first_loss_and_the_reason_stand_there():
    console, file, clock = console_of(tty=False)
    with console:
        formed = GenerationFormed(t=clock.now, generation=1, members=(0, 1), cause="start")
        console.show(formed)
        for worker in (1, 0):
            event = WorkerLost(
                t=clock.now + 5 - worker, worker=worker, rank=worker, generation=1, cause="died"
            )
            console.show(event)
        console.failed(QuorumLost("no worker is left; do this next."))
    end = file.getvalue().split("digits failed", 1)[1]
    assert "first failure: worker 1 (rank 1) died at 4.0 s" in end
    assert "no worker is left; do this next." in end


def test_a_long_traceback_keeps_both_ends():
    console, file, _ = console_of(tty=False)
    text = "\n".join(["Traceback:", *(f"  frame {n}" for n in range(500)), "ValueError: it"])
    with console:
        console.show(WorkerRaised(t=BEGAN, worker=0, rank=0, step=1, traceback=text))
        console.failed(WorkerFailed("it"))
    end = file.getvalue().split("digits failed", 1)[1]
    assert "frame 0" in end
    assert "ValueError: it" in end
    assert "482 lines" in end
    assert len(end.splitlines()) < 30


def test_nothing_from_a_user_steers_the_terminal():
    evil = "\x1b[2J[red]x[/red]\r\n\x07"
    text, _ = line(Reported(t=0, seq=0, step=1, metrics={evil: evil}))
    assert text.isprintable()
    assert "[red]x[/red]" in text  # shown, not obeyed
    for tty in (True, False):
        console, file, _ = console_of(tty, width=200)
        console._name = plain(evil)
        with console:
            console.show(Reported(t=BEGAN, seq=0, step=1, metrics={evil: evil}))
            console.show(WorkerRaised(t=BEGAN, worker=0, rank=0, step=1, traceback=evil))
            console.failed(WorkerFailed("it"))
            console.finished("ref", {evil: evil}, "exact")
        assert "\x1b[2J" not in file.getvalue()
        assert "\x07" not in file.getvalue()


def test_a_best_metric_that_nobody_reports_is_told_of_at_once_and_at_the_end():
    terminal = Terminal(file=(file := io.StringIO()), width=200, soft_wrap=True)
    console = Console("digits", "runs/store", terminal=terminal, best="acuracy")
    for step in (1, 2):
        console.show(Reported(t=0, seq=step, step=step, metrics={"accuracy": 0.5, "loss": 1.0}))
    told = file.getvalue()
    assert told.count("CheckpointConfig.best='acuracy' was not reported") == 1
    assert "accuracy, loss; did you mean 'accuracy'?" in told
    console.finished("ref", {}, "exact")
    assert "no best State: CheckpointConfig.best='acuracy'" in file.getvalue()


def test_a_best_metric_that_is_reported_needs_no_word():
    for metrics in ({"acc": 0.5}, {"acc": None}):
        terminal = Terminal(file=(file := io.StringIO()), width=200, soft_wrap=True)
        console = Console("digits", "runs/store", terminal=terminal, best="acc")
        console.show(Reported(t=0, seq=0, step=1, metrics=metrics))
        console.finished("ref", {}, "exact")
        assert "CheckpointConfig" not in file.getvalue()


def test_quiet_prints_nothing(capsys):
    with Console("r", "s", quiet=True) as console:
        console.show(GenerationFormed(generation=1, members=(0,), cause="start"))
        console.finished("a" * 64, {}, "exact")
    assert capsys.readouterr().out == ""


def test_what_happened_before_there_was_a_console_has_the_time_zero():
    console, file, _ = console_of(tty=False)
    with console:
        console.show(WorkerLost(worker=1, rank=1, generation=2, cause="died", t=BEGAN - 0.3))
    assert "    0.00  worker 1 lost" in file.getvalue()


def test_what_is_no_number_any_more_is_told_once_with_its_first_step():
    console, file, clock = console_of(tty=False)
    for step, loss in ((1, 0.5), (2, float("nan")), (3, float("inf"))):
        play(console, clock, [Reported(t=clock.now, seq=step, step=step, metrics={"loss": loss})])
    assert file.getvalue().count("loss was first reported as not finite at step 2") == 1
    console.finished("ab" * 32, {"loss": float("nan")}, "samples exact")
    assert file.getvalue().count("loss was first reported as not finite at step 2") == 2


def test_a_run_that_goes_on_says_since_when_and_from_where():
    before = Progress()
    for event in run_events(steps=30):
        before.add(event)
    file = io.StringIO()
    terminal = Terminal(file=file, width=200, soft_wrap=True)
    with Console("digits", "runs/store", terminal=terminal, progress=before, clock=Clock()):
        pass
    (first,) = file.getvalue().splitlines()
    assert "digits, which began 20" in first
    assert "had come to step 30, goes on" in first


@pytest.mark.parametrize(("goes_on", "words"), [(True, "stop() ends it"), (False, "fit() again")])
def test_ctrl_c_ends_with_one_line(goes_on, words):
    console, file, clock = console_of(tty=False)
    with console:
        play(console, clock, [Reported(t=clock.now, seq=0, step=3, metrics={"loss": 1.0})])
        before = len(file.getvalue().splitlines())
        console.interrupted(goes_on=goes_on)
    (last,) = file.getvalue().splitlines()[before:]
    assert words in last


@pytest.mark.parametrize(
    ("steps", "says"), [(0, "stored first, if a step"), (9, "stored first; Ctrl-C")]
)
def test_who_interrupts_a_run_is_told_whether_there_is_a_state_to_store(steps, says):
    before = Progress()
    for event in run_events(steps=steps):
        before.add(event)
    terminal = Terminal(file=(file := io.StringIO()), width=200, soft_wrap=True)
    console = Console("digits", "runs/store", terminal=terminal, progress=before)
    console.stopping()
    assert says in file.getvalue()


def test_slices_that_others_computed_are_a_line():
    text, _ = line(SlicesHandedOver(step=21, moved=((1, 0, 2), (1, 2, 1), (3, 0, 1))))
    assert text == (
        "step 21 is whole: slices of worker 1 computed by others (2 by 0, 1 by 2); "
        "slices of worker 3 computed by others (1 by 0)"
    )


def test_a_metric_that_the_guard_waits_for_in_vain_is_told_of():
    terminal = Terminal(file=(file := io.StringIO()), width=200, soft_wrap=True)
    console = Console("digits", "runs/store", terminal=terminal, judged="los")
    for step in (1, 2):
        console.show(Reported(t=0, seq=step, step=step, metrics={"loss": 1.0}))
    hint = "Guard.metric='los' was not reported (but loss; did you mean 'loss'?)"
    assert file.getvalue().count(hint) == 1
    assert "the guard judges gradients alone until it is" in file.getvalue()


_PRINTED = """
from elastix.observe.console import Console
from tests.report_data import run_events

with Console("digits", "runs/store") as console:
    for event in run_events(steps=300):
        console.show(event)
open("done", "w").close()
"""


def printed(folder, out):
    """Of a program that prints a run to `out`: its exit code, and what it has on stderr."""
    command = [sys.executable, "-c", _PRINTED]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=out, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (folder / "done").exists(), done.stderr
    return done.returncode, done.stderr


def test_a_run_goes_on_if_nobody_reads_its_output(tmp_path):
    """Of itself, rich would end the process, silently."""
    reads, writes = os.pipe()
    os.close(reads)
    told = "elastix: nobody reads the output any more; the run goes on\n"
    assert printed(tmp_path, writes) == (0, told)
    os.close(writes)


def test_a_run_goes_on_if_the_disk_of_its_output_is_full(tmp_path):
    told = "the output cannot be written (No space left on device); the run goes on"
    with Path("/dev/full").open("w") as full:
        assert printed(tmp_path, full) == (0, f"elastix: {told}\n")


def test_what_is_printed_once_there_is_room_is_there(tmp_path, monkeypatch, capsys):
    class Disk(io.StringIO):
        room = False

        def flush(self):
            if not self.room:
                self.seek(0)
                self.truncate()
                raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    output = terminal_of(None, quiet=False)
    output.print("one")
    output.print("two")
    disk.room = True
    output.print("three")
    assert disk.getvalue() == "three\n"
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_letters_that_the_encoding_of_the_output_lacks_do_not_end_a_run(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    output = terminal_of(None, quiet=False)
    assert output.encoding == "ascii"  # by which rich chooses the lines of a block
    output.print("größe 0.5")
    output.print("two")
    assert written.getvalue() == b"gr??e 0.5\ntwo\n"


def test_a_command_prints_letters_that_the_encoding_of_the_output_lacks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    _open_what_is_closed()
    print("größe", flush=True)  # as rich prints a table
    assert written.getvalue() == b"gr??e\n"
