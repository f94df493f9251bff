"""Writers as processes of their own, for the chaos tests of the store; killed for real."""

import multiprocessing as mp
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from elastix.errors import NotFound
from elastix.state import Ref, State
from elastix.store import Store
from elastix.store.local_packs import LocalWriter
from elastix.store.records import Header, Place, padded

CONTEXT = mp.get_context("forkserver")
torch.set_num_threads(1)


def model(seed: int, ref: Ref | None = None, kilobytes: int = 8) -> State:
    """Eight tensors of which half are the same for every seed."""
    common = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(seed + 1)
    size = kilobytes * 1024 // 4
    tensors = {f"layer{i}": torch.rand(size, generator=own if i % 2 else common) for i in range(8)}
    return State(tensors, {"seed": seed}, (ref,) if ref else ())


class IndexFirst(Store):
    """The wrong order: the index names a model before its bytes are in the pack."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        late = Late(self._packs._folder, self._packs._writers)  # type: ignore[attr-defined]
        self._writer = late
        self._ledger._writer = late

    def put(self, state: State, **options: Any) -> Ref:
        ref = super().put(state, **options)
        self._writer.flush()  # type: ignore[union-attr]
        return ref


class Late(LocalWriter):
    """A writer that promises places and writes later."""

    def __init__(self, folder: Path, writers: Path) -> None:
        super().__init__(folder, writers)
        self._late: list[tuple[Header, bytes]] = []
        self._promised = 0

    def append(self, header: Header, payload: Any) -> Place:
        if self._handle < 0:
            self._begin()
            self._promised = 0
        self._late.append((header, bytes(payload)))
        place = Place(self._pack, self._promised + 64, header.length)
        self._promised += 64 + padded(header.length)
        return place

    def sync(self) -> None:
        pass

    def flush(self) -> None:
        for header, payload in self._late:
            super().append(header, payload)
        super().sync()
        self._late.clear()


def put_for_ever(path: str, seed: int, swapped: bool, kilobytes: int, out: Connection) -> None:
    """Put models until killed; send each ref once it is acknowledged."""
    store = IndexFirst(Path(path)) if swapped else Store(path)
    parent = None
    number = 0
    out.send("ready")
    while True:
        parent = store.put(model(seed * 100_000 + number, parent, kilobytes))
        out.send((parent, seed * 100_000 + number))
        number += 1
        if number % 5 == 0:
            store.tag(f"writer{seed}", parent)


def put_some(path: str, seed: int, count: int, out: Connection) -> None:
    """Put `count` models, half of each in common with all others."""
    with Store(path) as store:
        out.send("ready")
        out.recv()
        try:
            refs = [store.put(model(seed * 1000 + n)) for n in range(count)]
        except Exception as error:  # noqa: BLE001 - a process border: the parent judges it
            out.send(repr(error))
        else:
            out.send(refs)


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """A process and the end of a pipe to it."""
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(*args, there), daemon=True)
    process.start()
    there.close()
    return process, here


def heard(connection: Connection) -> list[Any]:
    """Everything that was sent, until now or until the other end was closed."""
    found = []
    try:
        while connection.poll():
            found.append(connection.recv())
    except (EOFError, OSError):
        pass
    return found


def kill_within(process: BaseProcess, seconds: float, choose: random.Random) -> None:
    """SIGKILL at a random moment, or earlier if the process ends by itself (it must not)."""
    ended = wait([process.sentinel], timeout=choose.uniform(0, seconds))
    assert not ended, "a writer ended by itself"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()


def churn(path: str, seed: int, rounds: int, out: Connection) -> None:
    """Put a chain and retire it from behind, as checkpoints do; leave the last three.

    Says when it has put `rounds` of them, and goes on until told to stop.
    """
    with Store(path) as store:
        out.send("ready")
        refs: list[Ref] = []
        done = 0
        while done < rounds or not out.poll():
            refs.append(store.put(model(seed * 1_000_000 + done, refs[-1] if refs else None)))
            if len(refs) > 3:
                store.retire(refs.pop(0))
            done += 1
            if done == rounds:
                out.send("done")
        out.send(refs)


def read_for_ever(path: str, out: Connection) -> None:
    """Hold views of whatever is there, compare them again and again, until told to stop."""
    held: list[tuple[State, Any]] = []
    reads = 0
    with Store(path) as store:
        out.send("ready")
        while not out.poll():
            for entry in store.log(limit=4):
                try:
                    state = store.get(entry.ref)
                except NotFound:  # retired since
                    continue
                if len(held) < 20:
                    held.append((state, state.manifest()))
                reads += 1
            for state, before in held:
                if state.manifest() != before:
                    out.send("a held view changed")
                    return
    out.send(("unchanged", reads, len(held)))
