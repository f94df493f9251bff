"""From step logs to the numbers that are compared, the same way for every system.

Every worker logs each step it took (``StepRecord``) as soon as the group has agreed on its
gradient: when ``backward`` returns, in torchft when ``optimizer.step`` returns, which votes. A
step is *committed* for a worker when it has such a gradient to step with, and its samples are
*counted* when they are in it. The *surviving history* is what is still in the weights at the
end: when the whole group restarts (a new ``attempt``) at step r, committed steps from r on of
earlier attempts are erased.

For one pass over a fixed number of samples and one SIGKILL:

* ``stall_s``: for each survivor the seconds from the SIGKILL to its first agreed gradient beyond
  what was committed before: of the step the victim died in, or of a later one.
  Where the group was restarted, the first step of the new group counts, although it is only
  done again, and the survivors are the restarted workers in the places of the survivors.
* ``caught_up_s``: seconds until a survivor finished the step the victim died in, or a later
  one. The same as the stall where nothing is rolled back.
* ``steps_lost``: erased steps that had been finished, plus attempts at a step after the kill
  that survivors had to throw away.
* ``samples_dropped``: samples of the pass that are in no step of the surviving history when
  the pass is over. ``samples_repeated``: samples that are in more than one.
* ``contributes_s``: seconds until a process that was not there before the kill has its samples
  in a committed step of a group that is as large as it was, None if that never happened.
* ``step_s``: the usual time of a step before the kill, for scale.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from platform import python_version
from typing import Any, TypedDict


class StepRecord(TypedDict):
    """One step of one worker, a line in its step log."""

    t: float
    worker: int
    pid: int
    attempt: float
    step: int
    ids: list[int]
    world: int
    committed: bool
    counted: bool


class Repeat(TypedDict):
    """What one kill cost."""

    stall_s: list[float]
    caught_up_s: float
    steps_lost: int
    samples_dropped: int
    samples_repeated: int
    contributes_s: float | None
    step_s: float


class Range(TypedDict):
    """Median and maximum."""

    median: float
    max: float


class Summary(TypedDict):
    """Medians over the repeats.

    A repeat's stall is that of its slowest survivor; repeats in which nobody joined are left out
    of the median of ``contributes_s``.
    """

    stall_s: Range
    caught_up_s: float
    steps_lost: float
    samples_dropped: float
    samples_repeated: float
    contributes_s: float | None
    step_s: float


@dataclass(frozen=True)
class Kill:
    """The SIGKILL.

    Attributes:
        t: When, on the monotonic clock.
        pid: The process that died.
        step: The step it died in.
    """

    t: float
    pid: int
    step: int


def read_kill(stamp: Path, step: int) -> Kill:
    """Reads the stamp that a victim left behind.

    Args:
        stamp: The file given to ``workload.kill_in_mid_backward``.
        step: The step it was told to die in.
    """
    content = json.loads(stamp.read_text(encoding="utf-8"))
    return Kill(t=content["t"], pid=content["pid"], step=step)


def read_logs(paths: Iterable[Path]) -> list[StepRecord]:
    """Reads step logs into one list, in order of time; a torn last line is left out."""
    records: list[StepRecord] = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records += [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(records, key=lambda record: record["t"])


def account(records: Sequence[StepRecord], kill: Kill, samples: int) -> Repeat:
    """Does the accounting for one run with one kill.

    Args:
        records: All workers' step records.
        kill: The kill.
        samples: Number of samples in the pass.

    Raises:
        ValueError: No survivor ever finished a step after the kill.
    """
    before = [record for record in records if record["t"] <= kill.t]
    after = [record for record in records if record["t"] > kill.t]
    stalls = _stalls(before, after, kill)
    caught_up = [r["t"] for r in after if r["committed"] and r["step"] >= kill.step]
    if not stalls or not caught_up:
        raise ValueError("no survivor finished a step after the kill")
    kept, erased = _split_history(records)
    old = {record["pid"] for record in before}
    discarded = Counter(r["pid"] for r in after if not r["committed"] and r["pid"] in old)
    drawn = Counter(index for r in kept if r["counted"] for index in r["ids"])
    joined = _first_contribution(before, after)
    return {
        "stall_s": [round(stall, 3) for stall in stalls],
        "caught_up_s": round(min(caught_up) - kill.t, 3),
        "steps_lost": len(erased) + max(discarded.values(), default=0),
        "samples_dropped": sum(1 for index in range(samples) if not drawn[index]),
        "samples_repeated": sum(1 for count in drawn.values() if count > 1),
        "contributes_s": None if joined is None else round(joined - kill.t, 3),
        "step_s": round(_usual_step(before), 3),
    }


def summarise(repeats: Sequence[Repeat]) -> Summary:
    """Puts repeats into one row of the comparison."""
    worst = [max(repeat["stall_s"]) for repeat in repeats]
    joined = [r["contributes_s"] for r in repeats if r["contributes_s"] is not None]
    return {
        "stall_s": {"median": _median(worst), "max": max(worst)},
        "caught_up_s": _median(r["caught_up_s"] for r in repeats),
        "steps_lost": _median(r["steps_lost"] for r in repeats),
        "samples_dropped": _median(r["samples_dropped"] for r in repeats),
        "samples_repeated": _median(r["samples_repeated"] for r in repeats),
        "contributes_s": _median(joined) if joined else None,
        "step_s": _median(r["step_s"] for r in repeats),
    }


def write_result(
    out: Path,
    system: str,
    packages: Sequence[str],
    settings: dict[str, Any],
    repeats: Sequence[Repeat],
) -> None:
    """Writes the result file of one system and prints its summary.

    Args:
        out: The file.
        system: Name of the system.
        packages: Distributions whose versions belong to the result.
        settings: What the run was given.
        repeats: What each kill cost.
    """
    versions = {"python": python_version()} | {name: version(name) for name in packages}
    summary = summarise(repeats)
    result = {
        "system": system,
        "versions": versions,
        "settings": settings,
        "repeats": list(repeats),
        "summary": summary,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary))


def common_arguments(
    description: str | None, steps: int, kill_step: int
) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that every system's module takes.

    Args:
        description: The module's docstring, whose first line is shown.
        steps: Default number of steps in the pass.
        kill_step: Default step in which the victim dies.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps, help="steps in the pass")
    parser.add_argument("--kill-step", type=int, default=kill_step)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one repeat")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    return parser


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _stalls(before: Sequence[StepRecord], after: Sequence[StepRecord], kill: Kill) -> list[float]:
    survivors = {r["worker"] for r in before} - {
        r["worker"] for r in before if r["pid"] == kill.pid
    }
    attempt = max(record["attempt"] for record in before)
    first: dict[int, float] = {}
    for record in after:
        is_new = record["step"] >= kill.step or record["attempt"] > attempt
        if record["committed"] and is_new and record["worker"] in survivors:
            first.setdefault(record["worker"], record["t"] - kill.t)
    return [first[worker] for worker in sorted(first)]


def _split_history(
    records: Sequence[StepRecord],
) -> tuple[list[StepRecord], set[tuple[float, int]]]:
    committed = [record for record in records if record["committed"]]
    starts: dict[float, int] = {}
    for record in committed:
        attempt = record["attempt"]
        starts[attempt] = min(record["step"], starts.get(attempt, record["step"]))
    kept: list[StepRecord] = []
    erased: set[tuple[float, int]] = set()
    for record in committed:
        attempt, step = record["attempt"], record["step"]
        if any(later > attempt and start <= step for later, start in starts.items()):
            erased.add((attempt, step))
        else:
            kept.append(record)
    return kept, erased


def _first_contribution(before: Sequence[StepRecord], after: Sequence[StepRecord]) -> float | None:
    known = {record["pid"] for record in before}
    size = max(record["world"] for record in before)
    return next(
        (r["t"] for r in after if r["counted"] and r["world"] >= size and r["pid"] not in known),
        None,
    )


def _usual_step(before: Sequence[StepRecord]) -> float:
    pid = before[0]["pid"]
    times = [record["t"] for record in before if record["pid"] == pid]
    return statistics.median(b - a for a, b in pairwise(times))
