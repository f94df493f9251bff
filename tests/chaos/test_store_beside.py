"""Writers are killed while others collect, rebuild and remove the index: nothing is lost."""

import random
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from elastix.errors import StoreError
from elastix.state import Ref
from elastix.store import Store
from tests.chaos.store_processes import heard, kill_within, model, start


def write_for_ever(path: str, seed: int, out: Connection) -> None:
    """Put, retire and tag until killed; a refusal is answered by opening the store again."""
    out.send("ready")
    parent, number, mine = None, 0, []
    while True:
        with suppress(StoreError), Store(path) as store:
            for _ in range(20):
                number += 1
                parent = store.put(model(seed * 100_000 + number, parent, kilobytes=2))
                out.send(("put", parent, seed * 100_000 + number))
                mine.append(parent)
                if len(mine) > 6:
                    gone = mine.pop(0)
                    out.send(("retiring", gone, 0))
                    store.retire(gone)


def disturb_for_ever(path: str, seed: int, out: Connection) -> None:
    """Collect, verify, rebuild; and now and then the index is gone."""
    choose = random.Random(seed)
    out.send("ready")
    while True:
        with suppress(StoreError), Store(path) as store:
            for _ in range(choose.randint(1, 4)):
                what = choose.choice(["gc", "gc", "verify", "rebuild"])
                found = getattr(store, what)()
                if what == "verify" and found:
                    out.send(("damage", str(found[:3]), 0))
        if choose.random() < 0.2:
            for file in Path(path).glob("index.sqlite*"):
                file.unlink(missing_ok=True)


def kill_and_disturb(path: Path, kills: int, seed: int) -> int:
    """Kill one of three after the other, at random moments; how many models were acknowledged."""
    choose = random.Random(seed)
    Store(path).close()
    said: list[tuple[str, str, int]] = []
    targets = [write_for_ever, write_for_ever, disturb_for_ever]
    running = [start(target, str(path), n) for n, target in enumerate(targets)]
    try:
        for kill in range(kills):
            place = choose.randrange(3)
            process, pipe = running[place]
            assert pipe in wait([pipe, process.sentinel]), "it did not begin"
            kill_within(process, 0.2, choose)
            said += [message for message in heard(pipe) if message != "ready"]
            running[place] = start(targets[place], str(path), kill + 3)
    finally:
        for process, _ in running:
            process.kill()
            process.join()
    for _, pipe in running:
        said += [message for message in heard(pipe) if message != "ready"]
    assert [message for message in said if message[0] == "damage"] == []
    acknowledged = {Ref(ref): number for what, ref, number in said if what == "put"}
    going = {ref for what, ref, _ in said if what == "retiring"}
    for _ in range(2):  # with the index as it is, and with one made anew
        with Store(path) as store:
            for ref, number in acknowledged.items():
                if ref not in going:
                    state = store.get(ref)
                    expected = model(number, None, kilobytes=2).manifest().tensors
                    assert state.manifest().tensors == expected
            assert store.verify() == []
            store.gc()
            store.rebuild()
    return len(acknowledged)


@pytest.mark.timeout(240)
def test_twenty_kills_beside_whatever_else_there_is(tmp_path: Path) -> None:
    assert kill_and_disturb(tmp_path / "store", kills=20, seed=1) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_kills_beside_whatever_else_there_is(tmp_path: Path) -> None:
    acknowledged = kill_and_disturb(tmp_path / "store", kills=500, seed=2)
    print(f"500 kills, {acknowledged} models acknowledged, none lost")
