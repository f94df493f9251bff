"""The goals of the benchmarks, and what of their results is measured against each.

Not here: how documents show them (table).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.search import RIVALS, behind_beyond_chance, excess

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
    return lambda value, results: value <= max(1.0, number_at(model, "ddp_vs_ddp_p75")(results))


def _within_hsdp(value: float, results: Results) -> bool:
    """Reached at 1, and up to the upper quartile of HSDP's step time over its own."""
    return value <= max(1.0, number_at("steps", "hsdp_vs_hsdp_p75")(results))


def _within_torch(value: float, results: Results) -> bool:
    """The same beside torch's own pipeline."""
    return value <= max(1.0, number_at("pipes", "torch_vs_torch_p75")(results))


def number_at(*path: str | int) -> Callable[[Results], float]:
    """What stands there in the results."""

    def measure(results: Results) -> float:
        found: Any = results
        for part in path:
            found = found[part]
        return float(found)

    return measure


def _within_error(*path: str) -> Callable[[float, Results], bool]:
    """Reached at minus the standard error of that place and above."""
    return lambda value, results: value >= -number_at(*path)(results)


def _ratio(over: tuple[str | int, ...], under: tuple[str | int, ...]) -> Callable[[Results], float]:
    return lambda results: number_at(*over)(results) / number_at(*under)(results)


def _harms_each_half_hour(results: Results) -> float:
    return float(sum(results["struck"].values()) * 1800 / results["seconds"])


def _beyond(more: tuple[str | int, ...], less: tuple[str | int, ...]) -> Callable[[Results], float]:
    return lambda results: number_at(*more)(results) - number_at(*less)(results)


def _journal_memory(steps: int, reader: str) -> tuple[str | int, ...]:
    return "journal", str(steps), "peak_mib", reader


def _growth(part: str, kind: str, most: int, fewest: int, results: Results) -> float:
    """What each of the most costs over what each of the fewest does."""
    found = results[part]
    return float(found[str(most)][kind] / most / (found[str(fewest)][kind] / fewest))


def _worst_kill(key: str, results: Results) -> float:
    """By the journals of all runs, and no less than the median of what workers logged."""
    found = results["elastix"]
    return float(max(found[key], found.get(f"audit_{key.removeprefix('samples_')}", 0)))


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
    _, behind, error = excess(results["regret"][table], "default", ["optuna_tpe", "deephyper_cbo"])
    return behind / error


def _behind_beyond_chance(name: str, results: Results) -> int:
    """How many rivals are better on how many tables, by more than chance explains."""
    return len(behind_beyond_chance(results["regret"], name, RIVALS))


def _tables_held(name: str, results: Results) -> int:
    """Tables on which it is within one standard error of the best rival that is measured there."""
    found = (
        excess(rows, name, [rival for rival in RIVALS if rival in rows])
        for rows in results["regret"].values()
    )
    return sum(behind <= error for _, behind, error in found)


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

_ESTIMATE = (
    ("peak_ratio", "peak memory over its estimate", 0.8, 1.2),
    ("step_ratio", "estimated over measured step", 0.5, 2.0),
)

GPU_MODELS = {
    "convnet": "convnet",
    "transformer": "transformer",
    "convnet_large": "convnet, 8 times the batch",
    "transformer_large": "transformer, 8 times the batch, not compiled",
}
"""The models of benchmarks.gpu, and their names in documents."""

_GPU: tuple[tuple[str, str, Callable[[Results], float], Callable[[float, Results], bool]], ...] = (
    *(
        (
            f"step time over DDP's in a world of one, {name}",
            "<= 1.05",
            number_at("overhead", model, "elastix_over_ddp", "median"),
            at_most(1.05),
        )
        for model, name in GPU_MODELS.items()
    ),
    *(
        (
            f"a checkpoint of 5 GB: {what}, over DCP's async save",
            "<= 1",
            _ratio(("stall", "elastix", key), ("stall", "dcp_async", key)),
            at_most(1.0),
        )
        for key, what in (
            ("held_ms_median", "how long it holds the training thread"),
            ("first_held_ms", "how long the first one does"),
            ("longer_ms_median", "how much longer its step takes"),
        )
    ),
    *(
        (
            f"a model of 2 GB {how} to the GPU, GB/s over those of {peer}",
            ">= 1",
            _ratio(("read", ours, "gb_per_s"), ("read", key, "gb_per_s")),
            at_least(1.0),
        )
        for ours, how in (
            ("store", "from the store"),
            ("store_first", "from a store opened just now"),
        )
        for key, peer in (
            ("torch_load_mmap", "torch.load(mmap=True)"),
            ("safetensors", "safetensors"),
        )
    ),
    (
        "trials an hour, four at a time over one",
        ">= 1.5",
        number_at("packing", "4", "gain"),
        at_least(1.5),
    ),
    *(
        (
            f"{what}, {name}",
            f"{low:g} to {high:g}",
            number_at("estimate", model, key),
            between(low, high),
        )
        for key, what, low, high in _ESTIMATE
        for model, name in GPU_MODELS.items()
    ),
)

CONDUCTOR = {
    "heartbeat_us": "a heartbeat",
    "tick_us": "the passing of time",
    "step_us": "a committed step",
    "loss_us_per_message": "a loss, each message of it",
    "join_us_per_message": "a join, each message of it",
}
"""What benchmarks.size measures of the conductor, and how the documents say it."""

JOURNAL_READERS = {
    "open": "a controller that takes a run over",
    "result": "the account of a run",
    "report": "the report of a run",
}
"""Who reads a journal in benchmarks.size, and how the documents say it."""

STORE_ASKED = {
    "adopt_us": "entering a model",
    "put_us": "putting a model",
    "get_us": "reading one",
    "lp_us": "nearest by prefix",
    "put_nearest_us": "the same after a put",
    "campaign_us": "the same in one campaign",
    "retire_us": "retiring one",
}
"""What benchmarks.size asks of large stores and is to cost the same in each, in microseconds."""

CAMPAIGN_READ = {
    "resume_s": "going on after a SIGKILL, CPU",
    "results_s": "reading the results, CPU",
    "dataframe_s": "the table of them, CPU",
}
"""What of a long campaign takes longer the longer it is, in seconds: as much for each trial."""

BUFFERS = {"digits": (72, 432), "mnist": (200, 1200)}
"""How many samples benchmarks.rehearsal keeps: 5 and 30 percent of its datasets."""
_FORMATS = ("tar", "parquet", "arrow", "tensors", "scattered")


def _errors(data: str, difference: str, results: Results) -> float:
    found = results[data][difference]
    return float(found["mean"] / found["standard_error"])


def _inherited(what: str, lcs: str, none: str) -> list[Row]:
    """What inheritance is worth to the search that proposes both of these variants."""
    return [
        Row(
            *("inherit", f"{what} over none, mean score of evolved candidates", ">= +0.20"),
            lambda r: r[lcs]["evolved_mean"] - r[none]["evolved_mean"],
            *(at_least(0.2), "{:+.2f}"),
        ),
        Row(
            *("inherit", f"share of candidates over 0.8, {what} over none", ">= 3"),
            *(_ratio((lcs, "share_over_080"), (none, "share_over_080")), at_least(3)),
        ),
        Row(
            *("inherit", f"epochs of full training, checkpoints of none over those of {what}"),
            *(">= 1.3", _ratio((none, "full_epochs_checkpoint"), (lcs, "full_epochs_checkpoint"))),
            at_least(1.3),
        ),
        Row(
            *("inherit", f"epochs of full training, from scratch over {what}", ">= 1.5"),
            _ratio((lcs, "full_epochs_scratch"), (lcs, "full_epochs_checkpoint")),
            at_least(1.5),
        ),
        Row(
            *("inherit", f"test accuracy, {what} less from scratch, points", ">= -0.5"),
            lambda r: 100 * (r[lcs]["test_accuracy_checkpoint"] - r[lcs]["test_accuracy_scratch"]),
            *(at_least(-0.5), "{:+.2f}"),
        ),
        Row(
            *("inherit", f"matching and loading a candidate, {what}, ms of CPU", "<= 5"),
            *(number_at(lcs, "match_cpu_ms"), at_most(5), "{:.1f}"),
        ),
    ]


ROWS = (
    Row(
        *("overhead", "step time over DDP's, MLP", "<= 1, or DDP's own upper quartile"),
        *(number_at("mlp", "ratio_median"), _within_noise("mlp")),
    ),
    Row(
        *("overhead", "step time over DDP's, convnet", "<= 1, or DDP's own upper quartile"),
        *(number_at("convnet", "ratio_median"), _within_noise("convnet")),
    ),
    Row(
        *("recovery", "SIGKILL to agreed gradient, median, s", "<= 0.2"),
        *(number_at("elastix", "stall_s", "median"), at_most(0.2)),
    ),
    Row(
        *("recovery", "SIGKILL to agreed gradient, maximum, s", "<= 0.5"),
        *(number_at("elastix", "stall_s", "max"), at_most(0.5)),
    ),
    *(
        Row(*("recovery", what, "0"), partial(_worst_kill, key), at_most(0), "{:.0f}")
        for key, what in (
            ("steps_lost", "steps lost"),
            ("samples_dropped", "samples dropped"),
            ("samples_repeated", "samples repeated"),
        )
    ),
    Row(
        *("recovery", "survivors' longest gap when a worker joins, in steps", "<= 1"),
        *(number_at("elastix", "join_gap_steps"), at_most(1.0)),
    ),
    Row(
        *("recovery", "loss to full strength with a spare, s", "<= 1"),
        *(number_at("elastix", "full_strength_spare_s"), at_most(1.0)),
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
        *(number_at("survived_share", "elastix"), at_least(1.0)),
    ),
    Row(
        *("goodput", "goodput with a kill every 30 s", ">= 0.90"),
        *(number_at("elastix"), at_least(0.9)),
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
            *("store", what, f"{sign} {bar:g}", number_at(key)),
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
            *("exact", what, f"{sign} {bar:g}", number_at(key)),
            *(at_most(bar), "{:.3g}"),
        )
        for key, what, sign, bar in _EXACT
    ),
    Row(
        *("exact", "stall for a State stored beside a shadow, 126 MB, ms", "0.0"),
        *(number_at("shadow_stall_ms"), at_most(0.05), "{:.1f}"),
    ),
    Row(
        *("exact", "SIGKILL to agreed gradient of the whole batch, median, s"),
        *("<= 0.3 and the lost slices' time", number_at("stall_s", "median")),
        lambda value, r: value <= 0.3 + number_at("details", "stall", "lost_slices_s")(r),
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
        *("exact", "false alarms", "0", number_at("flips", "false_alarms")),
        *(at_most(0), "{:.0f}"),
    ),
    Row(
        *("exact", "bad gradients that are void on all workers in their step", "all"),
        *(_ratio(("guard", "found"), ("guard", "faults")), at_least(1.0)),
    ),
    Row(
        *("exact", "stored States with a number that is not finite", "0"),
        *(number_at("guard", "corrupt_states"), at_most(0), "{:.0f}"),
    ),
    Row(
        *("exact", "recompilations by torch.compile over ten losses and joins", "0"),
        *(number_at("recompilations"), at_most(0), "{:.0f}"),
    ),
    *(
        Row(
            *("search", f"tables, of 15, on which no rival is ahead of {name} by a s.e.", "15"),
            *(partial(_tables_held, name), at_least(15), "{:.0f}"),
        )
        for name in ("default", "screened")
    ),
    *(
        Row(
            *("search", f"rivals and tables that {name} is behind, beyond chance (Holm, 5 %)", "0"),
            *(partial(_behind_beyond_chance, name), at_most(0), "{:.0f}"),
        )
        for name in ("default", "screened")
    ),
    *(
        Row(
            *("search", f"default's regret beyond the better of TPE and CBO, {table}", "<= 1 s.e."),
            *(partial(_default_excess, table), at_most(1.0), "{:+.1f}"),
        )
        for table in ("nasbench201/cifar100", "hpobench/segment")
    ),
    Row(
        *("search", "ask and tell of the default, 500 observations, 95 %, ms", "<= 50"),
        *(number_at("ask_tell_ms_p95", "default", "500"), at_most(50), "{:.1f}"),
    ),
    Row(
        *("executor", "no-op trials per second", ">= 150"),
        *(number_at("trials_per_s", "elastix_pool"), at_least(150), "{:.0f}"),
    ),
    Row(
        *("executor", "over Tune with reuse_actors", ">= 10"),
        *(_ratio(("trials_per_s", "elastix_pool"), ("trials_per_s", "tune_reuse")), at_least(10)),
    ),
    Row(
        *("executor", "over DeepHyper's Ray evaluator", ">= 3"),
        *(_ratio(("trials_per_s", "elastix_pool"), ("trials_per_s", "deephyper_ray")), at_least(3)),
    ),
    *_inherited("LCS", "lcs", "none"),
    *_inherited("screened LCS", "screened_lcs", "screened_none"),
    *(
        Row(
            *("estimate", f"{what}, {model}", f"{low:g} to {high:g}"),
            *(number_at(model, key), between(low, high)),
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
            *(number_at("ingest", "trials_4", f"{key}_ratio"), at_most(goal)),
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
        *(number_at("batch", "ratio"), at_most(1)),
    ),
    Row(
        *("data", "a lone trial's step, over a plain loop of torch: CPU", "<= 1.25"),
        *(number_at("lone_step", "ratio"), at_most(1.25)),
    ),
    Row(
        *("formats", "samples repeated or dropped, 20 schedules of losses over each format", "0"),
        lambda r: sum(r[f]["repeated"] + r[f]["dropped"] for f in _FORMATS),
        *(at_most(0), "{:.0f}"),
    ),
    *(
        Row(
            *("formats", f"a batch in the middle of 10 million rows, {what}, s of CPU", "<= 1"),
            *(number_at("resume_at_half", key, "cpu_s"), at_most(1), "{:.3f}"),
        )
        for key, what in (("by_row", "by row"), ("in_blocks", "in blocks"))
    ),
    Row(
        *("prediction", "error of the predicted loss of goodput, median of the runs", "<= 0.2"),
        *(number_at("loss_error", "median"), at_most(0.2)),
    ),
    *(
        Row(
            *("size", f"the conductor's CPU for {said}, 10,000 workers over 10", "<= 4"),
            *(_ratio(("events", "10000", kind), ("events", "10", kind)), at_most(4.0)),
        )
        for kind, said in CONDUCTOR.items()
    ),
    *(
        Row(
            *("size", f"memory of {said}, ten million steps over 100,000", "<= 1.1"),
            _ratio(_journal_memory(10_000_000, kind), _journal_memory(100_000, kind)),
            *(at_most(1.1), "{:.3f}"),
        )
        for kind, said in JOURNAL_READERS.items()
    ),
    *(
        Row(
            *("size", f"{said}, CPU, a million models over 10,000", "<= 2"),
            *(_ratio(("store", "1000000", kind), ("store", "10000", kind)), at_most(2.0)),
        )
        for kind, said in STORE_ASKED.items()
    ),
    Row(
        *("size", "collecting garbage, CPU for each model, the same", "<= 2"),
        *(partial(_growth, "store", "gc_s", 1_000_000, 10_000), at_most(2.0)),
    ),
    Row(
        *("size", "memory for nearest, a million models, bytes for each", "<= 500"),
        *(number_at("store", "1000000", "nearest_bytes_per_model"), at_most(500), "{:.0f}"),
    ),
    *(
        Row(
            *("size", f"{said}, for each trial, 100,000 trials over 10,000", "<= 1.5"),
            *(partial(_growth, "campaign", kind, 100_000, 10_000), at_most(1.5)),
        )
        for kind, said in CAMPAIGN_READ.items()
    ),
    Row(
        *("size", "a campaign's driver, CPU for each trial, the same", "<= 1.5"),
        _ratio(("campaign", "100000", "driver_us"), ("campaign", "10000", "driver_us")),
        at_most(1.5),
    ),
    Row(
        *("size", "64 processes, one killed each second: exactly once, equal at the end", "1"),
        lambda r: float(r["workers"]["64"]["exact"] and r["workers"]["64"]["equal"]),
        *(at_least(1), "{:.0f}"),
    ),
    *(
        Row(
            "rehearsal",
            f"{data}, {size} samples kept: Rehearsal less a reservoir, standard errors",
            ">= -1",
            partial(_errors, data, f"index_less_reservoir_{size}"),
            *(at_least(-1), "{:+.1f}"),
        )
        for data, sizes in BUFFERS.items()
        for size in sizes
    ),
    Row(
        *("rehearsal", "four workers: weights against one worker's, largest difference", "<= 1e-9"),
        number_at("groups", "index", "4", "furthest_from_one_process"),
        *(at_most(1e-9), "{:.1e}"),
    ),
    Row(
        *("rehearsal", "three of four killed: weights against the replay's, likewise", "<= 1e-9"),
        number_at("groups", "index", "4_under_fire", "furthest_from_replay"),
        *(at_most(1e-9), "{:.1e}"),
    ),
    *(
        Row(
            *("adapters", f"{model}: step time, over the same script's on {peer}", "<= 1.05"),
            *(number_at(f"{key}{ending}", "ratio_median"), at_most(1.05)),
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
        *(number_at("elastix --help", "cpu_s"), at_most(0.5)),
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
            *("startup", f"{said} of a finished run, beyond `import torch`, s of {unit}", "<= 1"),
            *(_beyond((name, key), ("import torch", key)), at_most(1.0)),
        )
        for name, said in (
            ("elastix run, finished", "`elastix run`"),
            ("fit, finished", "a script with `fit()`"),
        )
        for key, unit in (("cpu_s", "CPU"), ("wall_s", "time"))
    ),
    *(
        Row(
            *("ensemble", f"{task}: test error below the best single model's", ">= 15 %"),
            *(number_at(task, "error_less"), at_least(0.15), "{:.0%}"),
        )
        for task in ("digits", "mnist1d", "breast_cancer")
    ),
    *(
        Row("packing", what, goal, number_at(key), reached, shown)
        for key, what, goal, reached, shown in _PACKING
    ),
    *(
        Row(
            *("population", f"{task}: test accuracy over that of {name}", ">= 0, less one s.e."),
            number_at(f"over_{peer}", task, "mean"),
            _within_error(f"over_{peer}", task, "se"),
            "{:+.4f}",
        )
        for peer, name in (("tune_pbt", "Tune's PBT"), ("random_asha", "random search with Asha"))
        for task in ("digits", "mnist1d", "breast_cancer")
    ),
    *(
        Row(
            *("rungs", f"{table}: regret of Evolution with Asha over that of {other}", "<= 1"),
            _ratio(("regret", table, "evolution_asha", "mean"), ("regret", table, system, "mean")),
            at_most(1.0),
        )
        for system, other in (
            ("random_asha", "random search with Asha"),
            ("evolution", "Evolution alone"),
        )
        for table in (
            *("nasbench201/cifar10", "nasbench201/cifar100"),
            *("hpobench/segment", "hpolib/protein_structure"),
        )
    ),
    Row(
        *("population", "CPU of a child before its first step, p95, ms", "<= 20"),
        *(number_at("exploit_explore_cpu_ms", "p95"), at_most(20.0), "{:.1f}"),
    ),
    Row(
        *("crews", "step time of 2 crews of 2 over HSDP's 2 x 2", "<= 1, or HSDP's own quartile"),
        *(number_at("steps", "ratio_median"), _within_hsdp),
    ),
    Row(
        *("crews", "SIGKILL to agreed gradient, two of three crews broken, median, s", "<= 0.3"),
        *(number_at("kills", "stall_s", "median"), at_most(0.3)),
    ),
    *(
        Row(*("crews", what, "0"), number_at("kills", key), at_most(0), "{:.0f}")
        for key, what in (
            ("steps_lost", "steps lost when crews break"),
            ("samples_dropped", "samples dropped then"),
            ("samples_repeated", "samples repeated then"),
        )
    ),
    *(
        Row(
            *("crews", f"step with float32 on the wire over one with bfloat16, {rate}", ">= 1.6"),
            *(number_at("wire", key, "bfloat16_gain"), at_least(1.6)),
        )
        for key, rate in (("200_mbit", "200 Mbit/s"), ("1_gbit", "1 Gbit/s"))
    ),
    Row(
        *("crews", "bytes of synchronous training over DiLoCo's, 20 inner steps", ">= 18"),
        *(number_at("wire", "diloco_fewer_bytes"), at_least(18.0), "{:.1f}"),
    ),
    Row(
        *("crews", "DiLoCo's accuracy below synchronous training's, digits, points", "<= 1"),
        *(number_at("diloco", "points_lost"), at_most(1.0)),
    ),
    Row(
        *("crews", "step time of 2 pipelines of 2 stages over torch's own with DDP"),
        "<= 1, or torch's own quartile",
        *(number_at("pipes", "ratio_median"), _within_torch),
    ),
    Row(
        *("crews", "SIGKILL of a stage to agreed gradient, three pipelines, median, s", "<= 0.3"),
        *(number_at("pipe_kills", "stall_s", "median"), at_most(0.3)),
    ),
    Row(
        *("crews", "samples dropped then", "0", number_at("pipe_kills", "samples_dropped")),
        *(at_most(0), "{:.0f}"),
    ),
    Row(
        *("crews", "a lost crew made good with a spare, over that without one, s", "<= 0.5"),
        _ratio(("spares", "rebuilt_with_s", "median"), ("spares", "rebuilt_without_s", "median")),
        at_most(0.5),
    ),
    *(
        Row(
            *("crews", what, f"<= {bar}"),
            *(number_at("slices", key, "ratio_median"), at_most(bar)),
        )
        for key, what, bar in (
            (
                "slices_over_whole",
                "step of crews in as many slices as workers over one without",
                1.05,
            ),
            ("exact_over_slices", "exact=True over that, crews", 1.1),
        )
    ),
    Row(
        *("endurance", "the run under fire has the bytes of the quiet one, exactly once", "1"),
        *(lambda results: float(results["exact"] and results["byte_equal"]), at_least(1), "{:.0f}"),
    ),
    Row(
        *("endurance", "kills, stops, leaves and cuts, each half hour", ">= 360"),
        *(_harms_each_half_hour, at_least(360), "{:.0f}"),
    ),
    *(
        Row(
            *("endurance", f"{role}: {what} at the end over those at the beginning", "<= 1.15"),
            *(_ratio(("growth", role, name, 1), ("growth", role, name, 0)), at_most(1.15)),
        )
        for role in ("driver", "controller", "worker")
        for name, what in (("mib", "MiB"), ("descriptors", "descriptors"), ("threads", "threads"))
    ),
    *(Row("gpu", what, goal, measure, reached) for what, goal, measure, reached in _GPU),
)


def value_of(row: Row, results: Results | None) -> float | None:
    """What was measured; None if nothing was."""
    try:
        return row.measure(results or {})
    except (KeyError, TypeError, ZeroDivisionError):
        return None
