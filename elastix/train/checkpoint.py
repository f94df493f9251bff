"""Where a run keeps its States, and which of them it keeps."""

import time
from dataclasses import dataclass
from pathlib import Path

from elastix import state as states
from elastix.events import StateDropped, StateStored
from elastix.state import Ref, State


@dataclass(frozen=True)
class Checkpoints:
    """States of one run as files `STEP-REF.safetensors` in a directory.

    One worker at a time writes; which one may change from State to State.

    Attributes:
        keep_last: how many States `store` leaves; None for all.
    """

    directory: Path
    keep_last: int | None = None

    def store(self, state: State, step: int, reason: str) -> tuple[StateStored, list[StateDropped]]:
        """Write a State durably, then drop the oldest beyond `keep_last`. Blocks."""
        started = time.monotonic()
        ref = state.manifest().ref
        path = self.directory / f"{step:010d}-{ref}.safetensors"
        states.save(state, path)
        dropped = []
        kept = self.newest_first()
        for old in kept[self.keep_last :] if self.keep_last else []:
            old.unlink(missing_ok=True)
            dropped.append(StateDropped(ref=ref_of(old), step=step_of(old)))
        stored = StateStored(
            ref=ref,
            step=step,
            path=str(path),
            reason=reason,
            stored_bytes=path.stat().st_size,
            store_s=time.monotonic() - started,
        )
        return stored, dropped

    def newest_first(self) -> list[Path]:
        """The States there are, the one with the most steps first."""
        return sorted(self.directory.glob("[0-9]*-*.safetensors"), reverse=True)


def step_of(path: Path) -> int:
    """Committed steps in the State that a file holds."""
    return int(path.stem.split("-", 1)[0])


def ref_of(path: Path) -> Ref:
    """Name of the State that a file holds."""
    return Ref(path.stem.split("-", 1)[1])
