"""An event as a line for people, without colours. What no person needs to hear of has none."""

from collections.abc import Iterable

from elastix.events import (
    AncestorIgnored,
    Event,
    GenerationFormed,
    ProcessorsDiffer,
    Recovered,
    ReplicasCompared,
    ReplicasDiverged,
    ReplicasLevelled,
    Reported,
    Resumed,
    ResumedFromShadow,
    RunStarted,
    SamplesLeftOut,
    ShadowDiffers,
    SlicesHandedOver,
    StateNotStored,
    StateStored,
    StepVoided,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerRaised,
    WorkerSlow,
    where_raised,
)
from elastix.observe.progress import number

IGNORED = (
    "begins with fresh weights although there is a model to inherit from: the train function calls "
    "ctx.prepare without ctx.inherit(model) before it"
)


def line(event: Event) -> tuple[str, str]:
    """Its text and a style that rich knows; an empty text if there is nothing to say."""
    text, style = _line(event)
    return plain(text), style


def _line(event: Event) -> tuple[str, str]:  # noqa: C901 - a case per event
    match event:
        case RunStarted():
            versions = ", ".join(f"{name} {value}" for name, value in event.versions.items())
            return f"run {event.name} starts, seed {event.seed} ({versions})", "dim"
        case Resumed(held=True):
            where = f"goes on from the State after step {event.step}"
            return f"{where}, in parts that processes of lost workers hold", "green"
        case Resumed():
            again = f"; {event.again} steps are computed again" if event.again else ""
            if event.step == 0 and not event.ref:
                fit = " that all were seen to hold" if event.again else ""
                return f"begins anew: no State was stored{fit}{again}", "cyan"
            return f"goes on from the State after step {event.step}{again}", "cyan"
        case ResumedFromShadow():
            lost = f"{event.steps_lost} steps lost"
            apart = "" if event.equal else "; its State is no longer equal to the last bit"
            return f"resumed from the shadow (worker {event.worker}): {lost}{apart}", "green"
        case ShadowDiffers():
            where = f"after step {event.step}{_distance(event)}; its State is copied anew"
            return f"the shadow (worker {event.worker}) differs from the group {where}", "yellow"
        case ProcessorsDiffer():
            kinds = (f"workers {_named(who)}: {kind}" for kind, who in event.kinds.items())
            rule = "they round differently, and go on from one State now and then"
            return f"different processors in the group: {rule} ({'; '.join(kinds)})", "yellow"
        case ReplicasLevelled():
            whose = f"all go on from the State of worker {event.worker}"
            return f"different processors: {whose} after step {event.step}", "dim"
        case GenerationFormed():
            who = " ".join(map(str, event.members))
            return f"generation {event.generation} ({event.cause}): workers {who}", "cyan"
        case WorkerLost():
            rank = f"rank {event.rank}" if event.rank >= 0 else "not in the group yet"
            return f"worker {event.worker} lost ({rank}, {event.cause})", "red"
        case WorkerNotStarted():
            return f"worker {event.worker} could not be started ({event.cause})", "yellow"
        case WorkerLeft():
            return f"worker {event.worker} left after step {event.step} ({event.cause})", "yellow"
        case WorkerSlow():
            factor = f"its part of a step takes {event.factor:.1f} times as long as the others'"
            return f"worker {event.worker} is slow: {factor}", "yellow"
        case Recovered():
            step = "" if event.outcome == "between steps" else f" step {event.step}"
            stall = f"{event.stall_s:.2f} s ({event.outcome})"
            return f"recovered{step} in {stall}, 0 steps lost", "green"
        case SlicesHandedOver():
            return f"step {event.step} is whole: {_moved(event)}", "green"
        case WorkerJoined():
            return f"worker {event.worker} joined after step {event.step}: {copied(event)}", "green"
        case Reported():
            metrics = "  ".join(f"{name} {number(value)}" for name, value in event.metrics.items())
            return f"step {event.step}  {metrics}", ""
        case AncestorIgnored():
            return IGNORED, "yellow"
        case StateStored():
            return f"state {event.ref[:12]} stored after step {event.step} ({event.reason})", ""
        case StateNotStored():
            return f"State after step {event.step} not stored ({event.reason}): {event.why}", "red"
        case ReplicasCompared() if not event.equal:  # what is equal is summed up at the end
            who = " ".join(map(str, event.apart))
            what = f"of workers {who} differ in {', '.join(event.parts)}"
            return f"REPLICAS DIFFER: States after step {event.step} {what}", "bold red"
        case ReplicasDiverged():
            who, what = " ".join(map(str, event.apart)), ", ".join(event.parts)
            found = f"step {event.step + 1} void: States of workers {who} differ in {what}"
            if "gradients" in event.parts:
                found = f"step {event.step + 1} void: workers {who} miscalculated a slice ({what})"
            if not event.parts:
                lost = f"workers {who} were lost" if who else "some were lost"
                found = f"step {event.step + 1} void: States differed, and {lost} before all told"
            cure = "evicted" if event.cure == "evicted" else "all go back to the last stored State"
            if event.unseen:
                cure = "it may have been so in steps before, so all go back to the last State that "
                cure += "was compared"
            return f"{found}; {cure}", "red"
        case StepVoided():
            return f"step {event.step} void: {event.why}; its batches are left out", "yellow"
        case SamplesLeftOut():
            left_out = sum(stop - start for start, stop in event.spans)
            return f"{left_out} samples of loader {event.loader} are left out on purpose", "yellow"
        case WorkerRaised():
            error = last_error(event.traceback).partition("\n")[0].strip() or "an error"
            where = where_raised(event.worker, event.rank, event.step)
            return f"the train function raised on {where}: {error}", "bold red"
    return "", ""


def _named(workers: Iterable[int]) -> str:
    return " ".join(map(str, workers))


def _distance(event: ShadowDiffers) -> str:
    """By digest: in what, and since when."""
    if not event.parts:
        return ""
    return f" in {', '.join(event.parts)}, {event.followed} operations after it was copied"


def copied(event: WorkerJoined) -> str:
    """How a worker came by the State."""
    if not event.copy_bytes:
        return "it had the State as a shadow, 0 bytes copied"
    return f"{event.copy_bytes / 1e6:.1f} MB of State in {event.copy_s:.2f} s"


def _moved(event: SlicesHandedOver) -> str:
    by_owner: dict[int, list[str]] = {}
    for lost, to, slices in event.moved:
        by_owner.setdefault(lost, []).append(f"{slices} by {to}")
    return "; ".join(
        f"slices of worker {lost} computed by others ({', '.join(parts)})"
        for lost, parts in by_owner.items()
    )


def plain(text: str) -> str:
    """One line without control characters: names and metrics must not steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def plain_lines(text: str) -> list[str]:
    """As `plain`, line by line."""
    return [plain(part.expandtabs(4)) for part in text.splitlines()]


def last_error(traceback: str) -> str:
    """What the last exception of a traceback says: all lines of its message, and its notes."""
    lines = traceback.strip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    for at in range(frames[-1] if frames else len(lines), len(lines)):
        if lines[at] and not lines[at][0].isspace():  # as its frames are
            return "\n".join(lines[at:])
    return lines[-1] if lines else ""
