"""A timeline in Chrome's trace format (chrome://tracing, Perfetto): written as it happens.

Each worker appends to a file of its own, a JSON array whose end may be missing, as the format
allows: a worker that is killed leaves what it had. `merge` makes one file of all of them. Pure:
times are given in seconds since the Unix epoch.

Source: "Trace Event Format", the JSON array format, phases X, i and M.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from elastix.events import (
    Event,
    GenerationFormed,
    Recovered,
    RunEnded,
    StateStored,
    WorkerJoined,
    WorkerLost,
)

MERGED = "timeline.json"

_RUN = 1_000_000  # process id of what the run's events tell; workers have their own ids,
_TORCH = 2_000_000  # and torch's profiler of a worker that id and this much more


class Timeline:
    """Writes the spans of one process.

    Args:
        path: is begun anew.
        process: shown as the process id; tells the files of a run apart.
        name: of the process.
    """

    def __init__(self, path: Path, process: int, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w")
        self._file.write("[\n")
        self._process = process
        self._tracks: dict[str, int] = {}
        self._name("process_name", name, 0)

    def span(self, track: str, name: str, start: float, stop: float, **details: object) -> None:
        """Something that took from `start` to `stop`. Spans of one track must not overlap."""
        entry = {"ph": "X", "ts": start * 1e6, "dur": max(0.0, stop - start) * 1e6}
        self._add(track, name, entry, details)

    def instant(self, track: str, name: str, t: float, **details: object) -> None:
        """Something that happened at a moment."""
        self._add(track, name, {"ph": "i", "s": "t", "ts": t * 1e6}, details)

    def flush(self) -> None:
        """Hand what was written to the system, where it survives this process."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _add(
        self, track: str, name: str, entry: Mapping[str, object], details: Mapping[str, object]
    ) -> None:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            self._name("thread_name", track, self._tracks[track])
            sort = {"sort_index": self._tracks[track]}
            self._write({"ph": "M", "name": "thread_sort_index", "args": sort}, self._tracks[track])
        args = {"args": dict(details)} if details else {}
        self._write({"name": name, "cat": track, **entry, **args}, self._tracks[track])

    def _name(self, kind: str, name: str, track: int) -> None:
        self._write({"ph": "M", "name": kind, "args": {"name": name}}, track)

    def _write(self, entry: Mapping[str, object], track: int) -> None:
        line = json.dumps({**entry, "pid": self._process, "tid": track}, separators=(",", ":"))
        self._file.write(line + ",\n")


def merge(directory: Path, events: Iterable[Event] = ()) -> Path:
    """One file of all traces in `directory`, with what the run's events say of the same time.

    Traces of torch's profiler (`worker-N.torch.json`) stand under the worker as a process of
    their own.

    Returns:
        Its path: DIRECTORY/timeline.json.
    """
    path = directory / MERGED
    directory.mkdir(parents=True, exist_ok=True)  # none there if no worker has come up
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for entry in _entries(directory, events):
            file.write(separator + json.dumps(entry, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")
    draft.replace(path)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a trace that may lack its end, and part of its last line."""
    entries = []
    for line in path.read_text().splitlines()[1:]:
        try:
            entries.append(json.loads(line.rstrip(",")))
        except json.JSONDecodeError:
            break  # its writer was killed here
    return entries


def _entries(directory: Path, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    first, last = math.inf, -math.inf
    for path in sorted(directory.glob("worker-*.json")):
        if path.name.endswith(".torch.json"):
            yield from _torch(path)
            continue
        for entry in read(path):
            if "ts" in entry:
                first = min(first, entry["ts"] / 1e6)
                last = max(last, (entry["ts"] + entry.get("dur", 0.0)) / 1e6)
            yield entry
    if first < last:
        yield from _told(events, first, last, directory / "run.draft")


def _told(
    events: Iterable[Event], first: float, last: float, scratch: Path
) -> Iterator[dict[str, Any]]:
    """What the run's events say of the time from `first` to `last`: who was in the group when."""
    timeline = Timeline(scratch, _RUN, "run")

    def span(track: str, name: str, start: float, stop: float, **details: object) -> None:
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            timeline.span(track, name, start, stop, **details)

    before: GenerationFormed | None = None
    for event in events:
        match event:
            case GenerationFormed() | RunEnded():
                if before is not None:
                    name, members = f"generation {before.generation}", list(before.members)
                    span("group", name, before.t, event.t, members=members)
                before = event if isinstance(event, GenerationFormed) else None
            case WorkerLost() if first <= event.t <= last:
                name = f"worker {event.worker} lost"
                timeline.instant("losses", name, event.t, rank=event.rank, cause=event.cause)
            case Recovered():
                name = f"step {event.step} {event.outcome}"
                track = f"recovery of worker {event.worker}"
                span(track, name, event.t - event.stall_s, event.t, generation=event.generation)
            case WorkerJoined():
                name = f"copy of the State to worker {event.worker}"
                span("joins", name, event.t - event.copy_s, event.t, bytes=event.copy_bytes)
            case StateStored():
                name = f"checkpoint after step {event.step}"
                span("checkpoints", name, event.t - event.store_s, event.t, ref=event.ref)
    timeline.close()
    yield from read(scratch)
    scratch.unlink()


def _torch(path: Path) -> Iterator[dict[str, Any]]:
    """Torch's trace, its times made absolute and its processes moved beside the worker's."""
    try:
        trace = json.loads(path.read_text())
    except ValueError:  # its writer was killed over it; torch writes it all at once
        return
    base_us = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    worker = int(path.name.split("-")[1].split(".")[0])
    process = _TORCH + worker
    name = f"worker {worker}: torch.profiler"
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for entry in trace["traceEvents"]:
        if entry.get("ph") == "M" and entry.get("name") != "thread_name":
            continue
        moved = {**entry, "pid": process}
        if "ts" in entry and entry.get("ph") != "M":
            moved["ts"] = entry["ts"] + base_us
        yield moved
