"""How a run begins or goes on: which State, what its journal is told, what its workers are told."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from elastix.config import RestoreConfig
from elastix.data.left_out import KINDS, LeftOut
from elastix.errors import ConfigError, NotFound
from elastix.events import (
    Event,
    ReplicasCompared,
    Resumed,
    RunStarted,
    SamplesLeftOut,
    StateDropped,
    StateStored,
)
from elastix.observe import journal
from elastix.train.checkpoint import restore
from elastix.train.checkpoint.coordinator import Checkpoints
from elastix.train.control.run_state import RunState
from elastix.train.replica.link import Settings

OF_SCORES = (RunStarted, StateStored)
"""Events by which `take_up` knows which scores count."""
_OF_STATES = (*OF_SCORES, StateDropped, ReplicasCompared, *KINDS)


def begin(
    checkpoints: Checkpoints, settings: Settings, wanted: RestoreConfig
) -> tuple[list[Event], Settings]:
    """Choose the State to go on from.

    Returns:
        What belongs into the journal, after RunStarted; and the settings for the workers.

    Raises:
        ConfigError: samples are to be left out that the State has learnt from, or that are not
            known; nothing was changed.
        NotFound: no State of the wanted step is kept, or the journal of those that are kept is
            gone; nothing was changed.
    """
    path = settings.directory / "journal.jsonl"
    before = [*journal.read_only(path, *_OF_STATES)]
    take_up(checkpoints, settings, before)
    last = checkpoints.last()
    if last is not None and not path.stat().st_size:
        raise NotFound(
            f"run {settings.run!r} has a State of step {last.step} in the store, but its journal "
            f"{path} is gone, and with it the account of the samples that the State has seen. "
            "Nothing was started. Restore the journal from a backup, or give the run another name."
        )
    told, sound = _unsound(before, exact=settings.exact)
    chosen = checkpoints.choose(wanted.step, sound)
    leave_out, start = wanted.leave_out, chosen.step if chosen else 0
    new = restore.samples_of(leave_out, journal.read(path), start) if leave_out else {}
    if new and chosen is None:
        raise ConfigError(
            "leave_out needs a stored State to go back to, and the run has none. Nothing was "
            "changed. Begin it under another name, without those samples in the dataset."
        )
    if sound is not None:
        told += checkpoints.go_back_to(sound)[1]
    checkpoints.go_on_from(wanted.step)
    paused = paused_step(settings)
    if paused > start:
        told.append(Resumed(step=paused, ref=""))
    elif chosen is not None or path.stat().st_size:
        told.append(Resumed(step=chosen.step if chosen else 0, ref=chosen.ref if chosen else ""))
    told += [SamplesLeftOut(loader=loader, spans=spans) for loader, spans in new.items()]
    return told, replace(settings, left_out=LeftOut((*before, *told)).spans)


def take_up(checkpoints: Checkpoints, settings: Settings, before: Iterable[Event]) -> None:
    """The journal is this process's alone, and so are the run's States from now on.

    Args:
        checkpoints: of the run.
        settings: of its workers.
        before: what the journal has; OF_SCORES alone are needed, and these only for `best`.
    """
    source = settings.model_source
    parents = () if source is None else source.parents
    checkpoints.take_up(parents, _scored_otherwise(settings, before))


def _scored_otherwise(settings: Settings, before: Iterable[Event]) -> set[str]:
    """States that were stored while the run went by another metric than from now on."""
    ours = then = settings.checkpoint.best, settings.checkpoint.mode
    if settings.checkpoint.best is None:
        return set()  # it goes by none, and the best until now stays that
    found: set[str] = set()
    for event in before:
        if isinstance(event, RunStarted) and event.checkpoint:
            then = event.checkpoint.get("best"), event.checkpoint.get("mode", "max")
        elif isinstance(event, StateStored) and then != ours:
            found.add(event.ref)
    return found


def paused_step(settings: Settings) -> int:
    """The last step in the State that was left at a pause, from which workers begin; 0 for none."""
    source = settings.model_source
    return 0 if source is None else source.paused_step()


def _unsound(before: Iterable[Event], *, exact: bool) -> tuple[list[Event], Collection[int] | None]:
    """What a run that was killed did not come to say, and to drop, when States had differed.

    Args:
        before: what its journal has.
        exact: it is to have the bytes of a run in which they had not, whether or not the next one
            compares them in each step.

    Returns:
        What the journal lacks; and see RunState.sound.
    """
    state = RunState()
    told: list[Event] = []
    for event in before:
        state.take(event)
    if exact and state.unjudged is not None:
        told.append(state.unjudged)
        state.take(state.unjudged)
    return told, state.sound
