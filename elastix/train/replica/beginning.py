"""What the train function changes once more in a run that goes on from a State.

A State is captured at a boundary, somewhere in the loop of the train function. Whoever begins from
it is given it in ctx.prepare, and then comes to that boundary anew. What stands on the way (a
change of weights between two loaders, a scheduler's step at the beginning of an epoch) was done
when the State was captured, and is done to it once more. At the first boundary that is found.

Not here: what becomes of it (worker_state).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from elastix.sharding import Part
from elastix.state import State, raw_bytes
from elastix.train.replica.tracked_objects import TrackedObjects

ENDED = "ended"
"""In the metadata of a State: the train function had come to its end, past any boundary."""


class Beginning:
    """See the module.

    Args:
        state: that this worker is about to begin from.
        tracked: its objects.
    """

    def __init__(self, state: State, tracked: TrackedObjects) -> None:
        self._tracked = tracked
        optimizers = {f"@{n}" for n, o in tracked.others.items() if o in tracked.optimizers}
        # An object of the user's may keep the very tensors that it is given.
        theirs = {name for name in state.tensors if _part(name) not in ("", *optimizers)}
        tensors = {n: t.clone() if n in theirs else t for n, t in state.tensors.items()}
        self._state = replace(state, tensors=tensors)

    @property
    def step(self) -> int:
        """The last one in it."""
        return int(self._state.meta["step"])

    def changed(self) -> tuple[str, ...]:
        """The names of objects that are not as the State has them, "model" among them."""
        now = self._tracked.capture({})
        names = {_part(n) for n in now.tensors if self._differs(n, now)}
        names |= {n for n in now.meta if n in self._objects and now.meta[n] != self._objects[n]}
        return tuple(sorted(name.removeprefix("@") or "model" for name in names))

    def put_back(self) -> None:
        """Objects become as the State has them."""
        self._tracked.put_back(self._state)

    @property
    def _objects(self) -> Mapping[str, Any]:
        return {n: meta for n, meta in self._state.meta.items() if _counts(n)}

    def _differs(self, name: str, now: State) -> bool:
        before, held = self._state.tensors.get(name), now.parts.get(name)
        if before is None or not _counts(name):
            return False  # an object that was not there, or of each worker's own
        if held is not None and tuple(before.shape) == held.whole:  # the object came later
            before = before[held.part.within(Part((0,) * len(held.whole), held.whole))]
        return not torch.equal(raw_bytes(before), raw_bytes(now.tensors[name]))


def _part(name: str) -> str:
    """Of which object an entry is; empty for the main model."""
    return name.split("/")[0] if name.startswith("@") else ""


def _counts(name: str) -> bool:
    return not name.startswith("@") or _part(name) not in ("@rng", "@loader")
