"""Run by test_store_faults.py with the library of store_faults.c loaded: fail every call once.

Prints one line of JSON: how many faults were injected and how often each error came of it.
"""

import ctypes
import errno
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from elastix.errors import NotFound, StoreError
from elastix.state import Ref, State
from elastix.store import Store

WRITE, SYNC, RENAME, OPEN, CREATE, TRUNCATE, ALLOCATE = (1 << n for n in range(7))
LIBRARY = ctypes.CDLL(None)
# What each error can come from.
KINDS = {
    errno.EIO: WRITE | SYNC | RENAME | TRUNCATE,
    errno.ENOSPC: WRITE | RENAME | CREATE | TRUNCATE | ALLOCATE | SYNC,
    errno.EMFILE: OPEN,
}


def state(number: int, parent: Ref | None = None) -> State:
    generator = torch.Generator().manual_seed(number)
    tensors = {f"t{i}": torch.rand(300, generator=generator) for i in range(3)}
    return State({**tensors, "common": torch.ones(100)}, {"n": number}, (parent,) if parent else ())


class Campaign:
    """Operations on one store, each with each of its system calls failing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.number = 0
        self.calls = 0
        self.promised: dict[Ref, State] = {}
        self.outcomes: Counter[str] = Counter()
        self.store = Store(root)
        self.must("put", self.put)

    def must(self, name: str, operation: Callable[[], object]) -> None:
        """Without a fault it works."""
        try:
            operation()
        except StoreError as error:
            raise SystemExit(f"{name} does not work after the fault was over: {error!r}") from error

    def put(self) -> None:
        self.number += 1
        new = state(self.number)
        self.promised[self.store.put(new)] = new

    def begin(self) -> None:
        """A put that begins a pack."""
        self.store._writer.seal()
        self.put()

    def shrink(self, keep: int) -> None:
        """Retire all but the first and the last few."""
        for ref in list(self.promised)[1:-keep]:
            if ref not in self.store.tags().values():
                self.store.retire(ref)
                del self.promised[ref]

    def tag(self) -> None:
        self.number += 1
        name = f"tag{self.number}"
        self.store.tag(name, next(iter(self.promised)))
        if name not in self.store.tags():
            raise SystemExit("an acknowledged tag is not there")

    def retire(self) -> None:
        self.store.tags()
        victim = list(self.promised)[-1]
        if len(self.promised) > 3 and victim not in self.store.tags().values():
            self.doubtful = victim, self.promised.pop(victim)
            self.store.retire(victim)
        else:
            self.put()

    def gc(self) -> None:
        self.store.gc()

    def open(self) -> None:
        self.store.close()
        try:
            self.store = Store(self.root)
        except StoreError:
            LIBRARY.fault_disarm()
            self.store = Store(self.root)
            raise

    def read(self) -> None:
        self.store.get(next(iter(self.promised)))

    def check(self) -> None:
        """Everything that was promised is there, bit for bit, and nothing is damaged."""
        for ref, expected in self.promised.items():
            if self.store.get(ref).manifest() != expected.manifest():
                raise SystemExit(f"model {ref} changed")
        for entry in self.store.log():
            self.store.get(entry.ref)
        damage = self.store.verify()
        if damage:
            raise SystemExit(f"damaged: {damage}")

    def fail(self, name: str, number: int, error: int, for_ever: bool) -> bool:
        """One operation with its `number`-th call failing; False if it has fewer calls."""
        operation = getattr(self, name)
        self.calls += 1
        if name == "gc":  # with something to move and something to remove
            self.shrink(keep=2)
            self.put()
        LIBRARY.fault_arm(str(self.root).encode(), KINDS[error], number, error, int(for_ever))
        outcome = "nothing"
        try:
            operation()
        except StoreError as caught:
            outcome = type(caught).__name__
            if isinstance(caught, NotFound):
                raise SystemExit(f"{name}: {caught!r} hides {errno.errorcode[error]}") from caught
        fired = LIBRARY.fault_disarm()
        if fired:
            self.outcomes[f"{name} {errno.errorcode[error]} {outcome}"] += 1
        self.must("put", self.put)
        if name == "retire" and outcome != "nothing":
            self.must("retire again", lambda: self.store.retire(self.doubtful[0]))
        if self.calls % 4 == 1:
            self.check()
        if self.calls % 10 == 9:
            self.must("gc", self.gc)
        return bool(fired)


def main(root: Path, stride: int) -> None:
    campaign = Campaign(root)
    for name in ("put", "begin", "tag", "retire", "read", "open", "gc"):
        for error in KINDS:
            for for_ever in (False, True):
                number = 1
                while campaign.fail(name, number, error, for_ever):
                    number += stride
                    if len(campaign.promised) > 60:  # keep it small, so that checks are quick
                        campaign.shrink(keep=20)
    campaign.check()
    campaign.store.close()
    with Store(root) as store:
        store.rebuild()
        for ref, expected in campaign.promised.items():
            if store.get(ref).manifest() != expected.manifest():
                raise SystemExit(f"model {ref} changed")
    print(json.dumps(campaign.outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
