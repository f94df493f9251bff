"""The documents' tables, made from benchmarks/results: goals and measurements, peers beside us.

`python -m benchmarks.table` prints them; `--update` puts each into the document that shows it,
between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. What was not measured says so, and so does
what missed its goal.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import ABOUT

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One goal.

    Attributes:
        benchmark: module under benchmarks/, and stem of its result file.
        what: in words.
        goal: in words.
        measure: the measured value, from the benchmark's results.
        reached: whether a value is good enough, given all results.
        shown: how to print the value.
    """

    benchmark: str
    what: str
    goal: str
    measure: Callable[[Results], float]
    reached: Callable[[float, Results], bool]
    shown: str = "{:.2f}"


def at_most(bar: float) -> Callable[[float, Results], bool]:
    """Reached at `bar` and below."""
    return lambda value, _: value <= bar


def at_least(bar: float) -> Callable[[float, Results], bool]:
    """Reached at `bar` and above."""
    return lambda value, _: value >= bar


def between(low: float, high: float) -> Callable[[float, Results], bool]:
    """Reached from `low` to `high`."""
    return lambda value, _: low <= value <= high


def _within_noise(model: str) -> Callable[[float, Results], bool]:
    """Reached at 1, and up to the upper quartile of DDP's step time over its own."""
    return lambda value, results: value <= max(1.0, _key(model, "ddp_vs_ddp_p75")(results))


def _key(*path: str) -> Callable[[Results], float]:
    def measure(results: Results) -> float:
        found: Any = results
        for part in path:
            found = found[part]
        return float(found)

    return measure


def _within_error(*path: str) -> Callable[[float, Results], bool]:
    """Reached at minus the standard error of that place and above."""
    return lambda value, results: value >= -_key(*path)(results)


def _ratio(over: tuple[str, ...], under: tuple[str, ...]) -> Callable[[Results], float]:
    return lambda results: _key(*over)(results) / _key(*under)(results)


def _best_peer_loss(results: Results) -> float:
    """Loss of goodput over that of the best peer."""
    peers = max(results["torchft"], results["ray_train"])
    return float((1 - results["elastix"]) / (1 - peers))


def _prediction_error(results: Results) -> float:
    """Relative error of the predicted loss of goodput."""
    loss = 1 - results["elastix"]
    return float(abs((1 - results["predicted_elastix"]) - loss) / loss)


def _default_excess(table: str, results: Results) -> float:
    """Regret of the default beyond the better peer's, in standard errors of the difference."""
    found = results["regret"][table]
    best = min((found["optuna_tpe"], found["deephyper_cbo"]), key=lambda one: float(one["mean"]))
    error = (found["default"]["se"] ** 2 + best["se"] ** 2) ** 0.5
    return float((found["default"]["mean"] - best["mean"]) / error)


_STORE = (
    ("bytes_ratio", "bytes for 200 models over unique tensor bytes", "<=", 1.01),
    ("put_wall_ratio_raw", "durable put over raw append and sync", "<=", 1.5),
    ("put_cpu_ratio_torch_save", "put, CPU over torch.save", "<=", 0.8),
    ("read_cpu_ratio_memcpy", "warm full read, CPU over memcpy", "<=", 2.5),
    (
        "prefix_cpu_gain_torch_load",
        "prefix handed out, ten in a row, CPU gain over torch.load",
        ">=",
        10.0,
    ),
    (
        "prefix_cpu_gain_safetensors",
        "prefix handed out, ten in a row, CPU gain over safetensors",
        ">=",
        3.0,
    ),
    ("lp_p50_us_100k", "nearest by prefix, 100,000 models, median, us", "<=", 50.0),
    ("lp_p99_us_100k", "the same, 99th percentile, us", "<=", 1000.0),
    ("lp_actor_p50_us", "the same through the actor, median, us", "<=", 2000.0),
    ("lcs_p50_ms_100k", "nearest by common subsequence, ms", "<=", 10.0),
    ("open_s_100k", "open with 100,000 models, s", "<=", 2.0),
    ("rebuild_s_100k", "rebuild its index from packs, s", "<=", 60.0),
)

_PACKING: tuple[tuple[str, str, str, Callable[[float, Results], bool], str], ...] = (
    (
        "starved_share",
        "trials that the gate let in, out of memory",
        "<= 1 %",
        at_most(0.01),
        "{:.1%}",
    ),
    ("fits_refused_share", "candidates that fit, refused", "<= 3 %", at_most(0.03), "{:.1%}"),
    ("fits_lost", "candidates that fit, let in and without a score", "0", at_most(0), "{:.0f}"),
    ("over_tune", "scored trials an hour over Ray Tune's", ">= 1.5", at_least(1.5), "{:.1f}"),
)

_EXACT = (
    ("slices_over_today", "step in as many slices as workers over one without", "<=", 1.02),
    ("eight_slices_over_plain", "step in eight slices over DDP with accumulation", "<=", 1.05),
    ("exact_over_slices", "exact=True over that", "<=", 1.10),
    ("slow_over_ideal", "one of three slowed three times, over the ideal", "<=", 1.15),
    ("sentinel_share", "sentinel's share of a step", "<=", 0.01),
    ("guard_share", "guard's share of a step", "<=", 0.005),
    ("steps_lost_all_killed", "steps lost when all are killed, with a shadow", "<=", 0.0),
)

_EXACT_PEERS = (
    *(
        (
            *(f"step of eight slices, {model}", " s", _key("details", f"cost_{model}", "eight_s")),
            *("DDP with accumulation", _key("peers", f"ddp_accumulating_{model}_s")),
        )
        for model in ("mlp", "convnet")
    ),
    (
        *("SIGKILL to agreed gradient, five workers, median", " s", _key("stall_s", "median")),
        *("torchft (without that batch)", _key("peers", "torchft_stall_s", "median")),
    ),
    (
        *("a stored State of 126 MB holds up training", " ms", _key("shadow_stall_ms")),
        *("DCP in the background", _key("peers", "checkpoint_stall_ms", "dcp_async")),
    ),
)
"""What, unit, ours, the peer's name and its number."""

_ESTIMATE = (
    ("peak_ratio", "peak memory over its estimate", 0.8, 1.2),
    ("step_ratio", "estimated over measured step", 0.5, 2.0),
)

_SIZE = {
    "heartbeat_us": "a heartbeat",
    "tick_us": "the passing of time",
    "step_us": "a committed step",
    "loss_us_per_message": "a loss, each message of it",
    "join_us_per_message": "a join, each message of it",
}
"""What benchmarks.size measures of the conductor, and how the documents say it."""

_KEPT = {"digits": (72, 432), "mnist": (200, 1200)}
_FORMATS = ("tar", "parquet", "arrow", "tensors", "scattered")


def _errors(data: str, difference: str, results: Results) -> float:
    found = results[data][difference]
    return float(found["mean"] / found["standard_error"])


ROWS = (
    Row(
        *("overhead", "step time over DDP's, MLP", "<= 1, or DDP's own upper quartile"),
        *(_key("mlp", "ratio_median"), _within_noise("mlp")),
    ),
    Row(
        *("overhead", "step time over DDP's, convnet", "<= 1, or DDP's own upper quartile"),
        *(_key("convnet", "ratio_median"), _within_noise("convnet")),
    ),
    Row(
        *("recovery", "SIGKILL to agreed gradient, median, s", "<= 0.2"),
        *(_key("elastix", "stall_s", "median"), at_most(0.2)),
    ),
    Row(
        *("recovery", "SIGKILL to agreed gradient, maximum, s", "<= 0.5"),
        *(_key("elastix", "stall_s", "max"), at_most(0.5)),
    ),
    Row(
        *("recovery", "steps lost", "0"),
        *(_key("elastix", "steps_lost"), at_most(0), "{:.0f}"),
    ),
    Row(
        *("recovery", "samples dropped", "0"),
        *(_key("elastix", "samples_dropped"), at_most(0), "{:.0f}"),
    ),
    Row(
        *("recovery", "samples repeated", "0"),
        *(_key("elastix", "samples_repeated"), at_most(0), "{:.0f}"),
    ),
    Row(
        *("recovery", "survivors' longest gap when a worker joins, in steps", "<= 1"),
        *(_key("elastix", "join_gap_steps"), at_most(1.0)),
    ),
    Row(
        *("recovery", "loss to full strength with a spare, s", "<= 1"),
        *(_key("elastix", "full_strength_spare_s"), at_most(1.0)),
    ),
    Row(
        *("checkpoint", "stall over that of DCP's async save", "<= 1"),
        *(_ratio(("stall_ms", "elastix"), ("stall_ms", "dcp_async")), at_most(1.0)),
    ),
    Row(
        *("checkpoint", "CPU over that of DCP's async save", "<= 0.8"),
        *(_ratio(("cpu_s", "elastix"), ("cpu_s", "dcp_async")), at_most(0.8)),
    ),
    Row(
        *("checkpoint", "accepted checkpoints that survive a rank's death", "1.00"),
        *(_key("survived_share", "elastix"), at_least(1.0)),
    ),
    Row(
        *("goodput", "goodput with a kill every 30 s", ">= 0.90"),
        *(_key("elastix"), at_least(0.9)),
    ),
    Row(
        *("goodput", "loss of goodput over the best peer's", "<= 0.5"),
        *(_best_peer_loss, at_most(0.5)),
    ),
    Row(
        *("goodput", "error of the predicted loss", "<= 0.2"),
        *(_prediction_error, at_most(0.2)),
    ),
    *(
        Row(
            *("store", what, f"{sign} {bar:g}", _key(key)),
            *(at_most(bar) if sign == "<=" else at_least(bar), "{:.3g}"),
        )
        for key, what, sign, bar in _STORE
    ),
    Row(
        *("search", "regret of Evolution over DeepHyper's, NAS-Bench-201 cifar100", "<= 0.7"),
        _ratio(
            ("regret", "nasbench201/cifar100", "evolution", "mean"),
            ("regret", "nasbench201/cifar100", "deephyper_re", "mean"),
        ),
        at_most(0.7),
    ),
    *(
        Row(
            *("exact", what, f"{sign} {bar:g}", _key(key)),
            *(at_most(bar), "{:.3g}"),
        )
        for key, what, sign, bar in _EXACT
    ),
    Row(
        *("exact", "stall for a State stored beside a shadow, 126 MB, ms", "0.0"),
        *(_key("shadow_stall_ms"), at_most(0.05), "{:.1f}"),
    ),
    Row(
        *("exact", "SIGKILL to agreed gradient of the whole batch, median, s"),
        *("<= 0.3 and the lost slices' time", _key("stall_s", "median")),
        lambda value, r: value <= 0.3 + _key("details", "stall", "lost_slices_s")(r),
    ),
    Row(
        *("exact", "schedules of kills that end with the quiet bytes", "all"),
        *(_ratio(("byte_equal", "equal"), ("byte_equal", "schedules")), at_least(1.0)),
    ),
    Row(
        *("exact", "flipped bits that are found and whose worker is named", "all"),
        *(_ratio(("flips", "culprit_named"), ("details", "flips", "flips")), at_least(1.0)),
    ),
    Row(
        *("exact", "false alarms", "0", _key("flips", "false_alarms")),
        *(at_most(0), "{:.0f}"),
    ),
    Row(
        *("exact", "bad gradients that are void on all workers in their step", "all"),
        *(_ratio(("guard", "found"), ("guard", "faults")), at_least(1.0)),
    ),
    Row(
        *("exact", "stored States with a number that is not finite", "0"),
        *(_key("guard", "corrupt_states"), at_most(0), "{:.0f}"),
    ),
    Row(
        *("exact", "recompilations by torch.compile over ten losses and joins", "0"),
        *(_key("recompilations"), at_most(0), "{:.0f}"),
    ),
    *(
        Row(
            *("search", f"default's regret beyond the better of TPE and CBO, {table}", "<= 1 s.e."),
            *(partial(_default_excess, table), at_most(1.0), "{:+.1f}"),
        )
        for table in ("nasbench201/cifar100", "hpobench/segment")
    ),
    Row(
        *("executor", "no-op trials per second", ">= 150"),
        *(_key("trials_per_s", "elastix_pool"), at_least(150), "{:.0f}"),
    ),
    Row(
        *("executor", "over Tune with reuse_actors", ">= 10"),
        *(_ratio(("trials_per_s", "elastix_pool"), ("trials_per_s", "tune_reuse")), at_least(10)),
    ),
    Row(
        *("executor", "over DeepHyper's Ray evaluator", ">= 3"),
        *(_ratio(("trials_per_s", "elastix_pool"), ("trials_per_s", "deephyper_ray")), at_least(3)),
    ),
    Row(
        *("inherit", "LCS over none, mean score of evolved candidates", ">= +0.20"),
        lambda r: r["lcs"]["evolved_mean"] - r["none"]["evolved_mean"],
        *(at_least(0.2), "{:+.2f}"),
    ),
    Row(
        *("inherit", "share of candidates over 0.8, LCS over none", ">= 3"),
        *(_ratio(("lcs", "share_over_080"), ("none", "share_over_080")), at_least(3)),
    ),
    Row(
        *("inherit", "epochs of full training, checkpoints of none over those of LCS", ">= 1.3"),
        _ratio(("none", "full_epochs_checkpoint"), ("lcs", "full_epochs_checkpoint")),
        at_least(1.3),
    ),
    Row(
        *("inherit", "epochs of full training, from scratch over LCS", ">= 1.5"),
        _ratio(("lcs", "full_epochs_scratch"), ("lcs", "full_epochs_checkpoint")),
        at_least(1.5),
    ),
    Row(
        *("inherit", "test accuracy, LCS less from scratch, points", ">= -0.5"),
        lambda r: 100 * (r["lcs"]["test_accuracy_checkpoint"] - r["lcs"]["test_accuracy_scratch"]),
        *(at_least(-0.5), "{:+.2f}"),
    ),
    Row(
        *("inherit", "matching and loading a candidate, LCS, ms of CPU", "<= 5"),
        *(_key("lcs", "match_cpu_ms"), at_most(5), "{:.1f}"),
    ),
    *(
        Row(
            *("estimate", f"{what}, {model}", f"{low:g} to {high:g}"),
            *(_key(model, key), between(low, high)),
        )
        for key, what, low, high in _ESTIMATE
        for model in ("mlp", "convnet", "transformer")
    ),
    Row(
        *("data", "decodes of a sample in two epochs, most of 1, 2 and 4 trials", "<= 1.05"),
        lambda r: max(r["ingest"][f"trials_{n}"]["shared"]["decodes_a_sample"] for n in (1, 2, 4)),
        at_most(1.05),
    ),
    *(
        Row(
            "data",
            f"four trials, Shared over private DataLoaders: {what}",
            f"<= {goal}",
            *(_key("ingest", "trials_4", f"{key}_ratio"), at_most(goal)),
        )
        for key, what, goal in (("cpu", "CPU", 0.4), ("wall", "time", 0.45))
    ),
    Row(
        "data",
        "four trials, Shared over Ray Data's materialize: CPU",
        "<= 1",
        _ratio(
            ("ingest", "trials_4", "shared", "cpu_s"),
            ("ingest", "trials_4", "ray_materialize", "cpu_s"),
        ),
        at_most(1),
    ),
    Row(
        *("data", "the loader's CPU for a batch of digits, over torch's", "<= 1"),
        *(_key("batch", "ratio"), at_most(1)),
    ),
    Row(
        *("data", "a lone trial's step, over a plain loop of torch: CPU", "<= 1.25"),
        *(_key("lone_step", "ratio"), at_most(1.25)),
    ),
    Row(
        *("formats", "samples repeated or dropped, 20 schedules of losses over each format", "0"),
        lambda r: sum(r[f]["repeated"] + r[f]["dropped"] for f in _FORMATS),
        *(at_most(0), "{:.0f}"),
    ),
    *(
        Row(
            *("formats", f"a batch in the middle of 10 million rows, {what}, s of CPU", "<= 1"),
            *(_key("resume_at_half", key, "cpu_s"), at_most(1), "{:.3f}"),
        )
        for key, what in (("by_row", "by row"), ("in_blocks", "in blocks"))
    ),
    Row(
        *("prediction", "error of the predicted loss of goodput, median of the runs", "<= 0.2"),
        *(_key("loss_error", "median"), at_most(0.2)),
    ),
    *(
        Row(
            *("size", f"the conductor's CPU for {said}, 10,000 workers over 10", "<= 4"),
            *(_ratio(("events", "10000", kind), ("events", "10", kind)), at_most(4.0)),
        )
        for kind, said in _SIZE.items()
    ),
    *(
        Row(
            "rehearsal",
            f"{data}, {size} samples kept: Rehearsal less a reservoir, standard errors",
            ">= -1",
            partial(_errors, data, f"index_less_reservoir_{size}"),
            *(at_least(-1), "{:+.1f}"),
        )
        for data, sizes in _KEPT.items()
        for size in sizes
    ),
    Row(
        *("rehearsal", "four workers: weights against one worker's, largest difference", "<= 1e-9"),
        _key("groups", "index", "4", "furthest_from_one_process"),
        *(at_most(1e-9), "{:.1e}"),
    ),
    Row(
        *("rehearsal", "three of four killed: weights against the replay's, likewise", "<= 1e-9"),
        _key("groups", "index", "4_under_fire", "furthest_from_replay"),
        *(at_most(1e-9), "{:.1e}"),
    ),
    *(
        Row(
            *("adapters", f"{model}: step time, over the same script's on {peer}", "<= 1.05"),
            *(_key(f"{key}{ending}", "ratio_median"), at_most(1.05)),
        )
        for model, ending in (("MLP", ""), ("convnet", "_convnet"))
        for key, peer in (
            ("fabric", "Lightning Fabric with DDP"),
            ("accelerate", "Accelerate with DDP"),
            ("ray_train", "DDP, as Ray Train prepares it"),
            ("transformers", "Trainer with DDP"),
        )
        if (key, model) != ("transformers", "convnet")  # it refuses batch norms
    ),
    Row(
        *("startup", "`elastix --help`, s of CPU", "<= 0.5"),
        *(_key("elastix --help", "cpu_s"), at_most(0.5)),
    ),
    *(
        Row(
            *("startup", f"the same over that of `{peer} --help`", "<= 1"),
            *(_ratio(("elastix --help", "cpu_s"), (f"{peer} --help", "cpu_s")), at_most(1.0)),
        )
        for peer in ("ray", "optuna")
    ),
    *(
        Row(
            *("ensemble", f"{task}: test error below the best single model's", ">= 15 %"),
            *(_key(task, "error_less"), at_least(0.15), "{:.0%}"),
        )
        for task in ("digits", "mnist1d", "breast_cancer")
    ),
    *(
        Row("packing", what, goal, _key(key), reached, shown)
        for key, what, goal, reached, shown in _PACKING
    ),
    *(
        Row(
            *("population", f"{task}: test accuracy over that of {name}", ">= 0, less one s.e."),
            _key(f"over_{peer}", task, "mean"),
            _within_error(f"over_{peer}", task, "se"),
            "{:+.4f}",
        )
        for peer, name in (("tune_pbt", "Tune's PBT"), ("random_asha", "random search with Asha"))
        for task in ("digits", "mnist1d", "breast_cancer")
    ),
    Row(
        *("population", "CPU of a child before its first step, p95, ms", "<= 20"),
        *(_key("exploit_explore_cpu_ms", "p95"), at_most(20.0), "{:.1f}"),
    ),
)


def goals(folder: Path = RESULTS) -> str:
    """All goals in Markdown: what, goal, measured, and whether it was missed.

    Args:
        folder: with the result files and about.json.
    """
    about = _read(folder / ABOUT) or {}
    lines = _header(["what", "goal", "measured", ""])
    for benchmark in dict.fromkeys(row.benchmark for row in ROWS):
        results = _read(folder / f"{benchmark}.json")
        lines.append(f"| **`python -m benchmarks.{benchmark}`** {_when(about, benchmark)} | | | |")
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
    tables = list(results["regret"])
    lines = _header(["searcher", *tables])
    for searcher in results["regret"][tables[0]]:
        cells = [results["regret"][table][searcher] for table in tables]
        shown = (f"{cell['mean']:.3g} ± {cell['se']:.1g}" for cell in cells)
        lines.append(f"| {searcher} | {' | '.join(shown)} |")
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


def sizes(folder: Path = RESULTS) -> str:
    """The conductor's CPU microseconds of one event, by the size of the group, in Markdown."""
    results = _read(folder / "size.json") or {}
    lines = _header(["workers", *_SIZE.values()])
    for size, found in results.get("events", {}).items():
        cells = [f"{found[kind]:.1f}" for kind in _SIZE]
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
        value = _value(row, _read(folder / f"{row.benchmark}.json"))
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
    sizes = [(data, size) for data, several in _KEPT.items() for size in several]
    names = {"digits": "digits", "mnist": "MNIST"}
    lines = _header(["", *(f"{names[data]}, {size} kept" for data, size in sizes)])
    for mode, said in _REHEARSED.items():
        cells = []
        for data, size in sizes:
            found = results[data].get(f"{mode}_{size}")
            if found is None and size == _KEPT[data][0]:  # it keeps nothing: one for both
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


DOCUMENTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"install": install, "headline": headline},
    "docs/data.md": {"ingest": ingest, "rehearsal": rehearsal},
    "docs/benchmarks.md": {
        "benchmarks": goals,
        "recoveries": recoveries,
        "regrets": regrets,
        "before-after": before_after,
        "sizes": sizes,
        "fleets": fleets,
        "exact-peers": exact_peers,
    },
}
"""Which document shows which tables, by path and name."""


def _header(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _line(row: Row, results: Results | None) -> str:
    value = _value(row, results)
    if value is None:
        return f"| {row.what} | {row.goal} | not measured | |"
    verdict = "" if row.reached(value, results or {}) else "**missed**"
    return f"| {row.what} | {row.goal} | {row.shown.format(value)} | {verdict} |"


def _value(row: Row, results: Results | None) -> float | None:
    """What was measured; None if nothing was."""
    try:
        return row.measure(results or {})
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _when(about: Results, benchmark: str) -> str:
    if benchmark not in about:
        return ""
    entry = about[benchmark]
    return f"({entry['date'][:10]}, {entry['cores']} cores)"


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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write them into the documents")
    if not parser.parse_args().update:
        tables = (table() for shown in DOCUMENTS.values() for table in shown.values())
        sys.stdout.write("\n\n".join(tables) + "\n")
        return
    for path, shown in DOCUMENTS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name, table in shown.items():
            text = updated(text, name, table())
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
