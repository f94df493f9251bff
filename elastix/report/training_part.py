"""A training run as parts of the page: its numbers at the top, its sections."""

from collections.abc import Iterator
from typing import Any

from rich.filesize import decimal

from elastix.data.audit import ReplicasAudit
from elastix.data.cursor import count
from elastix.events import RunStarted, where_raised
from elastix.flat import flatten
from elastix.observe.event_text import plain_lines
from elastix.observe.progress import Loss, Progress, duration, number
from elastix.report.page import Cell, Failure, Section, Table, Tile
from elastix.report.training import Training, WorkerRecord
from elastix.report.training_plots import training_figures
from elastix.report.usage_plots import usage_figures

_GOODPUT = (
    "Committed samples per second over the rate at which the largest group worked through steps "
    "that no change of the group disturbed. Evaluation and checkpoints are in both rates; the "
    "start-up is in neither."
)
_PARTS = ("data", "compute", "reduce", "wait", "checkpoint", "evaluate", "recover")
_LOSSES = 1000  # rows of the table of losses, the latest


def seconds(value: float | None) -> Cell:
    """A short time."""
    return Cell("", "") if value is None else Cell(f"{value:.3f} s", value)


def tiles(training: Training) -> Iterator[Tile]:
    """What matters first."""
    progress, account = training.progress, training.audit
    best = progress.best.value
    if best is not None:
        state = f", State {best.ref[:12]}" if best.ref else ""
        meaning = f"CheckpointConfig.best names {best.metric!r}: States are kept by it."
        yield Tile(best.metric, number(best.value), f"best, step {best.step}{state}", "", meaning)
    yield Tile("steps committed", f"{progress.step:,}", _so_far(progress))
    known = best.metric if best is not None else ""
    others = [entry for entry in progress.metrics.items() if entry[0] != known]
    for name, value in others[:2]:
        odd = progress.not_finite.get(name)
        since = f"last value, step {progress.metrics_step}"
        if odd is not None:
            yield Tile(name, number(value), f"not finite since step {odd}", "bad")
        else:
            yield Tile(name, number(value), since)
    if training.formed_s is not None:
        yield Tile("start-up", f"{training.formed_s:.1f} s", "until the group had formed")
    share = progress.goodput.share
    if share is not None:
        full = progress.goodput.full_rate or 0.0
        told = f"since the group formed, of {full:,.0f} samples/s undisturbed"
        yield Tile("goodput", f"{share:.1%}", told, "", _GOODPUT)
    slowest = progress.slowest_recovery_s
    worst = "nothing to recover from" if slowest is None else f"slowest recovery {slowest:.2f} s"
    if progress.not_started:
        worst += f"; {progress.not_started} more could not be started"
    yield Tile("workers lost", str(len(progress.losses)), worst)
    if account is not None and account.loaders:
        used = sum(loader.samples for loader in account.loaders)
        mood = "good" if account.exact else "bad"
        verdict = "each exactly once" if account.exact else "not exact: see the audit"
        left_out = sum(count(loader.left_out) for loader in account.loaders)
        verdict += f"; {left_out:,} left out on purpose" * bool(left_out)
        passed_over = sum(loader.passed_over for loader in account.loaders)
        verdict += f"; {passed_over:,} without a backward pass of their own" * bool(passed_over)
        yield Tile("samples", f"{used:,}", verdict, mood)
        if account.replicas.most > 1:
            yield _replicas(account.replicas)
        yield Tile("steps lost", str(account.steps_lost), "", "bad" if account.steps_lost else "")


def _so_far(progress: Progress) -> str:
    """How much of the plan is done; of a run that failed, that it did."""
    if progress.outcome in ("failed", "interrupted"):
        return f"{progress.outcome} there"
    return "" if progress.done is None else f"{progress.done:.0%} of the planned epochs"


def _replicas(found: ReplicasAudit) -> Tile:
    last = found.last
    if last is None:
        return Tile("replicas", "not compared")
    if not last.equal:
        return Tile("replicas", "differ", f"after step {last.step}", "bad")
    return Tile("replicas", "equal", f"compared last after step {last.step}", "good")


def failure(progress: Progress) -> Failure | None:
    """The first one of the process that ended the run, or is about to."""
    raised = progress.first_failure
    if raised is not None:
        where = where_raised(raised.worker, raised.rank, raised.step)
        text = "\n".join(plain_lines(raised.traceback.strip()))
        return Failure(f"First failure: the train function raised on {where}", text)
    if progress.outcome == "failed":
        return Failure("Why the run failed", "\n".join(plain_lines(progress.message)))
    return None


def sections(training: Training) -> Iterator[Section]:
    """All parts, those of a failure first."""
    plots = training_figures(training)
    group = [plot for plot in plots if plot.wide]
    curves = [plot for plot in plots if not plot.wide]
    yield Section("group", "Group", group, [*_losses(training), *_found(training)])
    if curves:
        yield Section("curves", "Training curves", curves)
    if training.workers:
        plots = usage_figures(training)
        yield Section("workers", "Workers", plots, [_workers(training)])
    yield Section("audit", "Samples", (), _audit(training), _verdict(training))
    if training.states_stored:
        yield Section("states", "States", (), [_states(training)])
    yield Section("setup", "How it was set up", (), [_setup(training.progress)])


def _losses(training: Training) -> list[Table]:
    found = training.progress.losses
    if not found:
        return []
    rows = [
        [
            Cell(f"{loss.t - training.began:.2f} s", loss.t),
            Cell(str(loss.worker), loss.worker),
            Cell(str(loss.rank) if loss.rank >= 0 else "none yet", loss.rank),
            Cell(loss.cause, loss.cause),
            Cell(str(loss.step), loss.step),
            seconds(loss.stall_s),
            seconds(loss.rebuild_s if loss.stall_s is not None else None),
            _how(loss),
        ]
        for loss in found[-_LOSSES:]
    ]
    names = ("after", "worker", "rank", "cause", "steps before", "recovered in", "new group", "how")
    caption = (
        "Recovered in: from the news of the loss until the slowest survivor had the agreed result "
        "of the step in hand; new group is the part of it until a process group worked again."
    )
    if len(found) > len(rows):
        caption += f" The latest {len(rows)} of {len(found)}."
    return [Table("losses", "Losses", names, rows, caption, sortable=True, wide=True)]


def _how(loss: Loss) -> Cell:
    handed = f"{loss.handed_over} slices computed by others" if loss.handed_over else ""
    text = ", ".join(part for part in (loss.outcome, handed) if part)
    return Cell(text, text)


def _found(training: Training) -> list[Table]:
    """What sentinel and guard found."""
    if not training.found:
        return []
    rows = [[Cell(f"{at:.2f} s", at), Cell(text, text)] for at, text in training.found]
    caption = "Workers and shadows that held another State, void steps, what is left out."
    return [Table("found", "Sentinel and guard", ("after", "what"), rows, caption, wide=True)]


def _workers(training: Training) -> Table:
    rows = []
    for number_, worker in sorted(training.workers.items()):
        cpu, memory = (worker.usage.get(name) for name in ("cpu", "memory"))
        cores = [point.value for point in cpu.points] if cpu is not None else []
        most = max((point.value for point in memory.points), default=0.0) if memory else 0.0
        rows.append(
            [
                Cell(str(number_), number_),
                Cell(worker.node[:12] or "-", worker.node),
                Cell(worker.device or "-", worker.device),
                Cell(duration(worker.present_s), worker.present_s),
                Cell(f"{worker.samples:,}", worker.samples),
                Cell("" if worker.rate is None else f"{worker.rate:,.0f}", worker.rate or 0.0),
                Cell(f"{sum(cores) / len(cores):.2f}" if cores else "", sum(cores)),
                Cell(decimal(round(most)) if most else "", most),
                *(_part(worker, part) for part in _PARTS[:4]),
            ]
        )
    names = ("worker", "node", "device", "in the group", "samples", "samples/s", "cores", "memory")
    caption = (
        "Samples are those of its own shares; cores are the mean, memory is the most. The parts "
        "of a step are shares of the training thread's time: reading data, computing, waiting for "
        "buckets to be reduced, waiting for the others. Reductions that overlap with computing do "
        "not count."
    )
    columns = (*names, *_PARTS[:4])
    return Table("workers-table", "Workers", columns, rows, caption, sortable=True, wide=True)


def _part(worker: WorkerRecord, part: str) -> Cell:
    share = worker.share(part)
    return Cell(f"{share:.0%}" if worker.measured else "", share)


def _verdict(training: Training) -> str:
    account = training.audit
    if account is None or not account.loaders:
        return "No batch of a loader has been committed."
    left_out = sum(count(loader.left_out) for loader in account.loaders)
    but = f", but for {left_out:,} that were left out on purpose" if left_out else ""
    what = f"Every sample was used exactly once{but}." if account.exact else "NOT EXACT."
    return (
        f"{what} {account.steps} steps stand, {account.steps_lost} are lost. "
        f"Digest of the account: {account.digest[:16]}. Replicas {account.replicas}."
    )


def _audit(training: Training) -> list[Table]:
    account = training.audit
    if account is None or not account.loaders:
        return []
    rows = [
        [
            Cell(str(loader.loader), loader.loader),
            Cell(f"{loader.length:,}", loader.length),
            Cell(f"{loader.samples:,}", loader.samples),
            Cell(str(loader.epochs), loader.epochs),
            _none_is_good(count(loader.repeated)),
            _none_is_good(count(loader.missing)),
            Cell(f"{count(loader.left_out):,}", count(loader.left_out)),
            Cell(f"{loader.passed_over:,}", loader.passed_over),
        ]
        for loader in account.loaders
    ]
    names = (
        *("loader", "dataset", "samples committed", "whole epochs", "repeated", "missing"),
        *("left out", "no pass of their own"),
    )
    caption = (
        "Added up from the shares of each committed step in the journal. Left out: never used, "
        "because a guard or RestoreConfig(leave_out=...) said so. No pass of their own: committed, "
        "but the train function drew the next batch before a backward pass."
    )
    return [Table("audit-table", "Sample audit", names, rows, caption, wide=True)]


def _none_is_good(amount: int) -> Cell:
    return Cell(f"{amount:,}", amount, "bad" if amount else "good")


def _states(training: Training) -> Table:
    rows = [
        [
            Cell(stored.ref[:12], stored.ref),
            Cell(str(stored.step), stored.step),
            Cell(f"{at:.2f} s", at),
            Cell(stored.reason, stored.reason),
            Cell(decimal(stored.stored_bytes), stored.stored_bytes),
            seconds(stored.store_s),
            seconds(stored.stall_s),
        ]
        for at, stored in reversed(training.states)
    ]
    caption = (
        f"Stored: {training.states_stored}, {decimal(training.stored_bytes)} written in all; "
        f"{training.states_dropped} were dropped again by the retention rule."
    )
    names = ("ref", "step", "after", "why", "new bytes", "written in", "held up training")
    return Table("states-table", "Stored States", names, rows, caption, sortable=True, wide=True)


def settings(run: RunStarted) -> dict[str, Any]:
    """What the run was set up with, by name; no journal has its FailureConfig."""
    facts: dict[str, Any] = {"seed": run.seed}
    if run.order_seed is not None:
        facts["seed of the order"] = run.order_seed
    exchange = run.exchange
    if exchange.get("every_steps") is None:  # then the outer optimizer is of no use
        exchange = {"wire": exchange.get("wire")}
    facts |= {"exact": run.exact, **flatten(run.config, "config.")}
    facts |= flatten(run.scaling, "scaling.")
    facts |= {**flatten(run.checkpoint, "checkpoint."), **flatten(exchange, "exchange.")}
    return {**facts, **flatten(run.versions, "version."), **flatten(run.origin, "origin.")}


def _setup(progress: Progress) -> Table:
    facts = {} if progress.run is None else settings(progress.run)
    rows = [[Cell(name), Cell(number(value))] for name, value in facts.items()]
    return Table("setup-table", "Arguments", ("name", "value"), rows)


def about(training: Training) -> list[str]:
    """A few words for the head of the page."""
    progress = training.progress
    workers = f"{len(progress.members)} of {progress.workers_wanted} workers"
    words = [f"ran {duration(progress.took_s)}"]
    return [*words, f"generation {progress.generation}", workers] if progress.members else words
