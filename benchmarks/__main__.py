"""The benchmarks, one after the other: `python -m benchmarks TARGET`.

- `timed`: what a clock says. It needs a machine on which nothing else runs.
- `counted`: what is counted, follows from a seed, or grows with size. It may run beside other work.
- `endurance`: half an hour under fire, on a machine on which nothing else runs.
- `short`: some of these in the smallest sizes, into `build`, to see that they run.

`--list` says what belongs to a target, and about how many minutes each takes on two cores; `--only`
takes some. One that fails does not stop the others: at the end stands how long each took and what
failed, and the exit status is 1. Results go to `benchmarks/results`, and the documents' tables are
made anew from them. After Ctrl-C it says how to go on; runs that a benchmark keeps for that
(NAME.json.runs.jsonl) are removed when it has ended well.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from benchmarks.table import RESULTS, ROOT, update


class Entry(NamedTuple):
    """A benchmark as a target runs it: what `--list` and `--only` call it, minutes, options."""

    target: str
    name: str
    minutes: float
    options: str = ""

    @property
    def out(self) -> Path:
        """Its result file."""
        return (ROOT / "build" if self.target == "short" else RESULTS) / f"{self.name}.json"

    @property
    def command(self) -> list[str]:
        """What runs it, in the repository's folder."""
        module = f"benchmarks.{self.name.partition('_')[0]}"
        out = str(self.out.relative_to(ROOT))
        return [sys.executable, "-m", module, "--out", out, *shlex.split(self.options)]


_EXACT_TIMED = "stall pace shares shadow dcp"
_EXACT_MANY = "--rounds 16 --steps 10 --parts cost_mlp"
_EXACT_COUNTED = "byte_equal flips guard quiet all_killed compiled_convnet compiled_transformer"
_FEW = "--rounds 2 --steps 3 --schedules 2 --kills 1 --parts all_killed byte_equal cost_mlp"
_SIZE_FEW = "--models 1000 --trials 100 --workers 4 --seconds 3"

ENTRIES = (
    Entry("timed", "overhead", 3, "--rounds 40"),
    Entry("timed", "recovery", 15, "--peer-repeats 3"),
    Entry("timed", "goodput", 9, "--minutes 2"),
    Entry("timed", "checkpoint", 3, "--rounds 10 --repeats 4"),
    Entry("timed", "store", 4, "--traces 3 --rounds 9"),
    Entry("timed", "executor", 2, "--repeats 5"),
    Entry("timed", "executor_waiting", 2, "--waiting 1000 10000 100000"),
    Entry("timed", "data", 3),
    Entry("timed", "estimate", 3),
    Entry("timed", "install", 2),
    Entry("timed", "startup", 2),
    Entry("timed", "exact", 15, f"{_EXACT_MANY} cost_convnet {_EXACT_TIMED} torchft"),
    Entry("timed", "adapters", 7, "--rounds 5 --steps 40"),
    Entry("timed", "crews", 11, f"--rounds 4 --torchft-python {shlex.quote(sys.executable)}"),
    Entry("timed", "size", 9, "--rounds 3 --parts events hour campaign workers"),
    Entry("timed", "packing", 6),
    Entry("counted", "formats", 2),
    Entry("counted", "exact", 26, f"--quiet-steps 10000 --parts {_EXACT_COUNTED}"),
    Entry("counted", "prediction", 9),  # each run is beside itself
    Entry("counted", "search", 26),
    Entry("counted", "rungs", 9),
    Entry("counted", "inherit", 15),
    Entry("counted", "ensemble", 12, "--seeds 4 --trials 16"),
    Entry("counted", "rehearsal", 32),
    Entry("counted", "population", 72, "--seeds 30"),
    Entry("counted", "size", 30, "--parts day journal store"),
    Entry("endurance", "endurance", 37, "--seconds 2100 --harms 440"),
    Entry("short", "overhead", 0.5, "--rounds 4 --steps 3"),
    Entry("short", "recovery", 1, "--repeats 1 --systems elastix"),
    Entry("short", "exact", 1, f"{_FEW} {_EXACT_TIMED}"),  # flips and guards: among the tests
    Entry("short", "endurance", 1.2, "--seconds 40 --harms 10"),
    Entry("short", "size", 0.4, f"--parts store campaign workers {_SIZE_FEW}"),
)
TARGETS = tuple(dict.fromkeys(entry.target for entry in ENTRIES))


def listed(entries: Sequence[Entry]) -> str:
    """A line for each, and a sum for each target."""
    lines = []
    for target, own in groupby(entries, lambda entry: entry.target):
        rows = list(own)
        lines.append(f"{target}, about {sum(one.minutes for one in rows):g} minutes:")
        lines += [f"  {one.name:18} {one.minutes:5g}  {one.options}".rstrip() for one in rows]
    return "\n".join(lines)


def ended_with(command: Sequence[str]) -> int:
    """Its exit status. Ctrl-C reaches it too: it is given the time to end what it has started."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def run(entries: Sequence[Entry], ended: Callable[[Sequence[str]], int] = ended_with) -> int:
    """All of them, then how long each took: 0, 1 if one failed, 130 after Ctrl-C."""
    said, worst = [""], 0
    for number, entry in enumerate(entries):
        print(f"== python {shlex.join(entry.command[1:])}", flush=True)
        began = time.monotonic()
        try:
            status = ended(entry.command)
        except KeyboardInterrupt:
            left = " ".join(one.name for one in entries[number:])
            said.append(f"go on with: python -m benchmarks {entry.target} --only {left}")
            worst = 130
            break
        took = f"{entry.name:18} {(time.monotonic() - began) / 60:5.1f} of {entry.minutes:g} min"
        said.append(f"{took}   FAILED with status {status}" if status else took)
        worst = 1 if status else worst
        if not status:
            entry.out.with_name(f"{entry.out.name}.runs.jsonl").unlink(missing_ok=True)
    print(*said, sep="\n")
    return worst


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, as --list calls them")
    parser.add_argument("--list", action="store_true", help="say what would run, and how long")
    options = parser.parse_args()
    chosen = [one for one in ENTRIES if options.target in (None, one.target)]
    if unknown := set(options.only or ()) - {one.name for one in chosen}:
        parser.error(f"--only {' '.join(sorted(unknown))}: no such benchmark; --list shows them")
    chosen = [one for one in chosen if not options.only or one.name in options.only]
    if options.list or options.target is None:
        print(listed(chosen))
        return 0
    status = run(chosen)
    if options.target != "short":
        update()
    return status


if __name__ == "__main__":
    sys.exit(main())
