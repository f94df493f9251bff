"""What exact runs are compared by: the bytes of the last State, and which samples steps had."""

import atexit
import shutil
import tempfile
from pathlib import Path

from elastix.events import Resumed, StateStored, StepCommitted
from elastix.state import raw_bytes
from elastix.store import Store


def kept():
    """A folder for a run that several tests look at, as long as this process lives."""
    folder = tempfile.mkdtemp(prefix="elastix-quiet-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def final(run):
    """The digest of the last State that a run has stored, and its tensors byte by byte."""
    stored = [event for event in run.events if isinstance(event, StateStored)][-1]
    with Store(run.directory / "store", read_only=True) as store:
        state = store.get(stored.ref)
        tensors = {name: raw_bytes(tensor).clone() for name, tensor in state.tensors.items()}
    return stored.digest, tensors


def samples_of(step):
    """The positions that a step had, whoever computed them."""
    spans = [span for batch in step.batches for share in batch.shares.values() for span in share]
    return sorted(position for start, stop in spans for position in range(start, stop))


def steps_of(events):
    """By number, the samples of each step that stands."""
    steps = {}
    for event in events:
        if isinstance(event, Resumed):
            steps = {number: had for number, had in steps.items() if number <= event.step}
        elif isinstance(event, StepCommitted):
            steps[event.step] = samples_of(event)
    return steps
