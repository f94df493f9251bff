"""The documents' tables, made from benchmarks/results: goals and measurements, peers beside us.

`python -m benchmarks.table` prints them; `--update` puts each into the document that shows it,
between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. What was not measured says so, and so does
what missed its goal.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goals import (
    BUFFERS,
    CONDUCTOR,
    GPU_MODELS,
    ROWS,
    STORE_ASKED,
    Results,
    Row,
    number_at,
    value_of,
)
from benchmarks.record import ABOUT

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

_EXACT_PEERS = (
    *(
        (
            *(
                f"step of eight slices, {model}",
                " s",
                number_at("details", f"cost_{model}", "eight_s"),
            ),
            *("DDP with accumulation", number_at("peers", f"ddp_accumulating_{model}_s")),
        )
        for model in ("mlp", "convnet")
    ),
    (
        *("SIGKILL to agreed gradient, five workers, median", " s", number_at("stall_s", "median")),
        *("torchft (without that batch)", number_at("peers", "torchft_stall_s", "median")),
    ),
    (
        *("a stored State of 126 MB holds up training", " ms", number_at("shadow_stall_ms")),
        *("DCP in the background", number_at("peers", "checkpoint_stall_ms", "dcp_async")),
    ),
)
"""What, unit, ours, the peer's name and its number."""


def goals(folder: Path = RESULTS) -> str:
    """All goals in Markdown: what, goal, measured, and whether it was missed.

    Args:
        folder: with the result files and about.json.
    """
    about = _read(folder / ABOUT) or {}
    lines = _header(["what", "goal", "measured", ""])
    for benchmark in dict.fromkeys(row.benchmark for row in ROWS):
        results = _read(folder / f"{benchmark}.json")
        when = _when(about, benchmark, results)
        lines.append(f"| **`python -m benchmarks.{benchmark}`** {when} | | | |")
        lines += [_line(row, results) for row in ROWS if row.benchmark == benchmark]
    return "\n".join(lines)


def recoveries(folder: Path = RESULTS) -> str:
    """How elastix and its peers take a kill, in Markdown; all rows were measured in one run."""
    results = _read(folder / "recovery.json") or {}
    columns = [
        "system",
        "stall, median / max, s",
        "steps lost",
        "samples dropped",
        "samples repeated",
        "a replacement contributes after, s",
        "kills",
    ]
    lines = _header(columns)
    for system, found in results.items():
        stall, again = found["stall_s"], found["contributes_s"]
        lines.append(
            f"| {system} | {stall['median']:.2f} / {stall['max']:.2f} | {found['steps_lost']:g} "
            f"| {found['samples_dropped']:g} | {found['samples_repeated']:g} "
            f"| {'never' if again is None else f'{again:.1f}'} | {found['repeats']} |"
        )
    return "\n".join(lines)


def regrets(folder: Path = RESULTS) -> str:
    """Regret of searchers by table, mean and standard error, in Markdown."""
    results = _read(folder / "search.json")
    if results is None:
        return "Not measured."
    searchers = list(dict.fromkeys(name for rows in results["regret"].values() for name in rows))
    lines = _header(["table", *searchers])
    for table, rows in results["regret"].items():
        cells = [rows.get(searcher) for searcher in searchers]
        shown = ("" if c is None else f"{c['mean']:.2g} ± {c['se']:.1g}" for c in cells)
        lines.append(f"| {table} | {' | '.join(shown)} |")
    return "\n".join(lines)


COMPARED = (
    ("overhead", "mlp.ratio_median", "step time over DDP's, MLP"),
    ("overhead", "convnet.ratio_median", "step time over DDP's, convnet"),
    ("recovery", "elastix.stall_s.median", "SIGKILL to agreed gradient, s"),
    ("recovery", "elastix, with a spare.stall_s.median", "the same with a spare, s"),
    ("recovery", "elastix.full_strength_spare_s", "loss to full strength with a spare, s"),
    ("executor", "trials_per_s.elastix_pool", "no-op trials per second"),
    ("executor", "trials_per_s.bare_pool", "those of a bare pool of actors"),
    ("goodput", "elastix", "goodput with a kill every 15 s"),
    ("store", "put_wall_ratio_raw", "durable put over raw append and sync"),
    ("store", "read_cpu_ratio_memcpy", "warm full read, CPU over memcpy"),
    ("store", "small_put_wall_ratio_raw", "durable put of a small model over the same"),
    ("store", "small_read_store_cpu_us", "warm full read of a small model, us of CPU"),
    ("store", "small_read_prefix_store_cpu_us", "a small model's prefix, handed out, us of CPU"),
    ("store", "lp_p50_us_100k", "nearest by prefix, 5,000 models, median, us"),
    ("store", "lcs_p50_ms_100k", "nearest by common subsequence, 5,000 models, ms"),
    ("store", "open_s_100k", "open with 5,000 models, s"),
)
"""What `before_after` shows: benchmark, its number, and how the document says it."""


def before_after(folder: Path = RESULTS) -> str:
    """The same benchmarks in an older tree and this one, in Markdown: median, least and most."""
    results = _read(folder / "before_after.json") or {}
    lines = _header(["what", f"before ({results.get('before', 'not measured')})", "after"])
    for benchmark, number, said in COMPARED:
        found = results.get(benchmark, {}).get(number)
        cells = ["not measured"] * 2
        if found is not None:
            trees = (found["before"], found["after"])
            cells = [f"{t['median']:.3g} ({t['min']:.3g} to {t['max']:.3g})" for t in trees]
        lines.append(f"| {said} | {' | '.join(cells)} |")
    return "\n".join(lines)


def exact_peers(folder: Path = RESULTS) -> str:
    """What peers took in the runs of `benchmarks.exact`, beside elastix."""
    results = _read(folder / "exact.json") or {}
    lines = _header(["what", "elastix", "peer"])
    for what, unit, ours, peer, theirs in _EXACT_PEERS:
        try:
            shown = [f"{measure(results):.3g}{unit}" for measure in (ours, theirs)]
        except (KeyError, TypeError):
            shown = ["not measured"] * 2
        lines.append(f"| {what} | {shown[0]} | {peer}: {shown[1]} |")
    return "\n".join(lines)


_DDP = ("elastix", (("DDP", "ddp"), ("plain torch", "torch")))
_DCP = ("elastix", (("DCP", "dcp_async"),))
_LOADS = (
    ("torch.load(mmap=True)", "torch_load_mmap"),
    ("safetensors", "safetensors"),
    ("a copy from ordinary memory", "ordinary_memory"),
    ("from pinned memory", "pinned_memory"),
)
_GPU = (
    *(
        (f"{what}, {name}, ms", "{:.1f}", 1e3, ("overhead", model, key), (), *_DDP)
        for model, name in GPU_MODELS.items()
        for key, what in (
            ("step_s", "a step"),
            ("host_s", "of it, until the training thread has issued it"),
        )
    ),
    *(
        (f"a checkpoint of 5 GB: {what}", shown, 1.0, ("stall",), (key,), *_DCP)
        for key, what, shown in (
            ("held_ms_median", "holds the training thread, ms", "{:.1f}"),
            ("first_held_ms", "the same, the first one, ms", "{:.0f}"),
            ("longer_ms_median", "makes its step longer by, ms", "{:.1f}"),
            ("durable_s_median", "is stored after, s", "{:.1f}"),
        )
    ),
    *(
        (f"{what}, GB/s", "{:.1f}", 1.0, ("read",), ("gb_per_s",), ours, _LOADS)
        for ours, what in (
            ("store", "a model of 2 GB from the store to the GPU"),
            ("store_first", "from a store opened just now, which compares digests"),
        )
    ),
)
"""What, how it is shown, times what; where it stands before and after ours, or a peer's, key."""


def gpu(folder: Path = RESULTS) -> str:
    """What benchmarks.gpu has measured of elastix and of others, in Markdown."""
    results = _read(folder / "gpu.json") or {}
    lines = _header(["what", "elastix", "others"])
    for what, shown, times, before, after, ours, peers in _GPU:
        names = [ours, *(key for _, key in peers)]
        paths = ((*before, name, *after) for name in names)
        mine, *theirs = (_cell(results, path, shown, times) for path in paths)
        others = ", ".join(f"{peer}: {cell}" for (peer, _), cell in zip(peers, theirs, strict=True))
        lines.append(f"| {what} | {mine} | {others} |")
    return "\n".join(lines)


def _cell(results: Results, path: Sequence[str], shown: str, times: float) -> str:
    try:
        return shown.format(times * number_at(*path)(results))
    except (KeyError, TypeError):
        return "not measured"


def sizes(folder: Path = RESULTS) -> str:
    """The conductor's CPU microseconds of one event, by the size of the group, in Markdown."""
    results = _read(folder / "size.json") or {}
    lines = _header(["workers", *CONDUCTOR.values()])
    for size, found in results.get("events", {}).items():
        cells = [f"{found[kind]:.1f}" for kind in CONDUCTOR]
        lines.append(f"| {int(size):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fleets(folder: Path = RESULTS) -> str:
    """What long runs of many workers cost the conductor, in Markdown."""
    results = _read(folder / "size.json") or {}
    columns = ["workers", "hours", "lost and replaced", "steps", "messages heard"]
    lines = _header([*columns, "CPU seconds", "share of a core"])
    for part, of in (("hour", "1,000 | 1"), ("day", "10,000 | 24")):
        found = results.get(part)
        if found is None:
            lines.append(f"| {of} | not measured | | | | |")
        else:
            heard = sum(found["events"].values())
            lines.append(
                f"| {found['workers']:,} | {found['hours']:g} | {found['losses']:,} "
                f"| {found['steps']:,} | {heard:,} | {found['conductor_cpu_s']:.0f} "
                f"| {found['share_of_a_core']:.2%} |"
            )
    return "\n".join(lines)


_STORES = {
    **STORE_ASKED,
    "lcs_us": "nearest by common subsequence",
    "log_us": "the latest ten",
}
_STORES_S = {
    "first_nearest_s": "the first question",
    "gc_s": "gc, one in a hundred retired",
    "gc_again_s": "gc again",
}


def stores(folder: Path = RESULTS) -> str:
    """What stores of so many models cost, in Markdown."""
    found = (_read(folder / "size.json") or {}).get("store", {})
    lines = _header(["CPU", *(f"{int(size):,} models" for size in found)])
    for kinds, unit, shown in ((_STORES, "us", "{:,.0f}"), (_STORES_S, "s", "{:.2f}")):
        for kind, said in kinds.items():
            cells = (shown.format(figures[kind]) for figures in found.values())
            lines.append(f"| {said}, {unit} | {' | '.join(cells)} |")
    return "\n".join(lines)


_CAMPAIGNS = {
    "driver_us": ("the driver, for each trial, us of CPU", "{:.0f}"),
    "driver_kib": ("its memory for each trial, KiB", "{:.1f}"),
    "journal_bytes": ("journal, bytes for each trial", "{:.0f}"),
    "database_bytes": ("trial database, bytes for each trial", "{:.0f}"),
    "resume_s": ("going on after a SIGKILL, s of CPU", "{:.2f}"),
    "results_s": ("`Results.open`, s of CPU", "{:.2f}"),
    "dataframe_s": ("`dataframe()`, s of CPU", "{:.2f}"),
    "show_s": ("`elastix campaign show`, s of CPU", "{:.2f}"),
    "report_s": ("`elastix report`, s of CPU", "{:.2f}"),
}


def campaigns(folder: Path = RESULTS) -> str:
    """What campaigns of so many trials cost, in Markdown."""
    found = (_read(folder / "size.json") or {}).get("campaign", {})
    lines = _header(["", *(f"{int(trials):,} trials" for trials in found)])
    for kind, (said, shown) in _CAMPAIGNS.items():
        cells = (shown.format(figures[kind]) for figures in found.values())
        lines.append(f"| {said} | {' | '.join(cells)} |")
    return "\n".join(lines)


_RULES = {"none": "no stopping rule", "median": "`Median`", "asha": "`Asha`"}


def waiting(folder: Path = RESULTS) -> str:
    """What a campaign's loop costs a trial among so many, by stopping rule, in Markdown."""
    results = _read(folder / "executor_waiting.json") or {}
    found = results.get("loop_us_per_trial", {})
    sizes: Results = next(iter(found.values()), {})
    lines = _header(["us of CPU", *(f"{int(trials):,} trials" for trials in sizes)])
    for rule, figures in found.items():
        lines.append(f"| {_RULES[rule]} | {' | '.join(f'{us:.0f}' for us in figures.values())} |")
    return "\n".join(lines)


_CROWDS = {
    "kills": ("killed", "{}"),
    "generations": ("groups formed", "{}"),
    "steps": ("steps", "{:,}"),
    "least": ("fewest in a step", "{}"),
    "pss_mib": ("MiB of a worker", "{:.0f}"),
    "total_mib": ("MiB of all", "{:,}"),
    "founded_s": ("first group after, s", "{:.1f}"),
    "step_s": ("step, median, s", "{:.2f}"),
    "replicas": ("in the group at the end", "{}"),
}


def crowds(folder: Path = RESULTS) -> str:
    """What became of many processes under fire, in Markdown."""
    found = (_read(folder / "size.json") or {}).get("workers", {})
    lines = _header(["workers", *(said for said, _ in _CROWDS.values())])
    for size, figures in found.items():
        cells = (shown.format(figures[kind]) for kind, (_, shown) in _CROWDS.items())
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


HEADLINE = {
    "SIGKILL to agreed gradient, median, s": "from a SIGKILL to the agreed gradient, median, s",
    "samples dropped": "samples dropped in ten kills",
    "step time over DDP's, convnet": "step time over that of torch's DDP, convnet",
    "goodput with a kill every 30 s": "goodput with a kill every 30 s",
    "over Tune with reuse_actors": "no-op trials per second, over Ray Tune's with reuse_actors",
    "epochs of full training, from scratch over LCS": "epochs to train a search's winner from "
    "scratch, over those from its inherited weights",
}
"""The rows of the README's small table: what each measures, and how the README says it."""


def headline(folder: Path = RESULTS) -> str:
    """The few rows that the README shows, in Markdown."""
    lines = _header(["what", "measured", "by"])
    rows = {row.what: row for row in ROWS}
    for what, said in HEADLINE.items():
        row = rows[what]
        value = value_of(row, _read(folder / f"{row.benchmark}.json"))
        shown = "not measured" if value is None else row.shown.format(value)
        lines.append(f"| {said} | {shown} | `benchmarks.{row.benchmark}` |")
    return "\n".join(lines)


def install(folder: Path = RESULTS) -> str:
    """A sentence on what installing takes."""
    found = _read(folder / "install.json")
    if found is None:
        return "How long that takes was not measured."
    mega = {name: round(found[name] / 1e6) for name in ("bytes", "torch_bytes", "ray_bytes")}
    return (
        f"The wheel has {found['wheel_bytes'] / 1e6:.1f} MB. With torch's CPU build the "
        f"environment takes {mega['bytes']:,} MB on the disk ({found['packages']} packages; torch "
        f"has {mega['torch_bytes']:,} MB of it, Ray {mega['ray_bytes']:,} MB), and `pip install` "
        f"took {found['install_s']:.0f} s (`python -m benchmarks.install`, two cores)."
    )


def ingest(folder: Path = RESULTS) -> str:
    """What four trials took to read the same pictures, in Markdown."""
    results = _read(folder / "data.json")
    if results is None:
        return "Not measured."
    lines = _header(["", "decodes of a sample", "CPU, s", "time, s"])
    for mode, said in _INGEST.items():
        found = results["ingest"]["trials_4"][mode]
        lines.append(
            f"| {said} | {found['decodes_a_sample']:.2f} | {found['cpu_s']:.2f} "
            f"| {found['wall_s']:.2f} |"
        )
    return "\n".join(lines)


_INGEST = {
    "private": "a DataLoader in each trial's process",
    "private_process": "a DataLoader with one process for each trial",
    "ray_materialize": "Ray Data, `materialize`",
    "shared": "`elastix.Shared`",
}


def rehearsal(folder: Path = RESULTS) -> str:
    """Accuracy in percent after tasks one after another, by what is rehearsed, in Markdown."""
    results = _read(folder / "rehearsal.json")
    if results is None:
        return "Not measured."
    sizes = [(data, size) for data, several in BUFFERS.items() for size in several]
    names = {"digits": "digits", "mnist": "MNIST"}
    lines = _header(["", *(f"{names[data]}, {size} kept" for data, size in sizes)])
    for mode, said in _REHEARSED.items():
        cells = []
        for data, size in sizes:
            found = results[data].get(f"{mode}_{size}")
            if found is None and size == BUFFERS[data][0]:  # it keeps nothing: one for both
                found = results[data].get(mode)
            cells.append(
                ""
                if found is None
                else f"{100 * found['mean']:.1f} ± {100 * found['standard_error']:.1f}"
            )
        lines.append(f"| {said} | {' | '.join(cells)} |")
    return "\n".join(lines)


_REHEARSED = {
    "none": "no rehearsal",
    "reservoir": "reservoir, one process",
    "index": "`Rehearsal`",
    "index_less_reservoir": "the difference, seed by seed",
    "all": "all the data so far, at each task",
}


def versions(folder: Path = RESULTS) -> str:
    """What came of other Pythons, torch and Ray, in Markdown."""
    results = _read(folder / "versions.json") or {}
    lines = _header(["Python", "torch", "Ray", "fast tests", "a run with a kill"])
    for found in results.values():
        row = found.get("installed", found["asked"])
        cells = [row["python"], row["torch"], row["ray"]]
        if "not_installed" in found:
            cells += ["could not be installed", ""]
        else:
            counts = found["tests"]
            cells += [
                ", ".join(f"{counts[kind]:,} {kind}" for kind in ("passed", "failed", "skipped")),
                "passed" if found["run"]["passed"] else "failed",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


DOCUMENTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"install": install, "headline": headline},
    "docs/data.md": {"ingest": ingest, "rehearsal": rehearsal},
    "docs/benchmarks.md": {
        "versions": versions,
        "benchmarks": goals,
        "recoveries": recoveries,
        "regrets": regrets,
        "before-after": before_after,
        "sizes": sizes,
        "fleets": fleets,
        "stores": stores,
        "campaigns": campaigns,
        "waiting": waiting,
        "crowds": crowds,
        "exact-peers": exact_peers,
    },
    "docs/gpu.md": {"gpu": gpu},
}
"""Which document shows which tables, by path and name."""


def _header(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _line(row: Row, results: Results | None) -> str:
    value = value_of(row, results)
    if value is None:
        return f"| {row.what} | {row.goal} | not measured | |"
    shown, verdict = row.shown.format(value), ""
    if not row.reached(value, results or {}):
        verdict = "**missed**"
        if shown in row.goal.split():  # rounded to the goal: show by how little
            shown = f"{value:.5g}"
    return f"| {row.what} | {row.goal} | {shown} | {verdict} |"


def _when(about: Results, benchmark: str, results: Results | None) -> str:
    if benchmark not in about:
        return ""
    entry = about[benchmark]
    dates = sorted(one["date"][:10] for one in (entry, *entry.get("parts", {}).values()))
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    gpu = (results or {}).get("device", {}).get("name")
    return f"({when}, {entry['cores']} cores{f', one {gpu}' if gpu else ''})"


def _read(path: Path) -> Any:  # noqa: ANN401
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def updated(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of that name.

    Raises:
        ValueError: the markers are not there.
    """
    markers = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = text.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise ValueError(f"no {markers[0]} ... {markers[1]} to write between")
    return f"{before}{begin}\n{content}\n{end}{after}"


def update() -> None:
    """Write every table into its document."""
    for path, shown in DOCUMENTS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name, table in shown.items():
            text = updated(text, name, table())
        (ROOT / path).write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write them into the documents")
    if not parser.parse_args().update:
        tables = (table() for shown in DOCUMENTS.values() for table in shown.values())
        sys.stdout.write("\n\n".join(tables) + "\n")
        return
    update()


if __name__ == "__main__":
    main()
