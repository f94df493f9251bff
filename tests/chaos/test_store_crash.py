"""Law 1: whatever writer is killed when, nothing acknowledged is lost, nothing visible broken."""

import random
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from elastix.errors import StoreError
from elastix.state import Ref
from elastix.store import Store
from tests.chaos.store_processes import heard, kill_within, model, put_for_ever, start


def kill_writers(
    path: Path, kills: int, *, swapped: bool = False, kilobytes: int = 8, check_every: int = 20
) -> dict[Ref, int]:
    """Two writers at a time, one of them killed at a random moment. Returns what was promised."""
    choose = random.Random(kills)
    promised: dict[Ref, int] = {}
    running = [start(put_for_ever, str(path), n, swapped, kilobytes) for n in range(2)]
    seed = 2
    try:
        for kill in range(1, kills + 1):
            process, pipe = running.pop(choose.randrange(2))
            assert pipe in wait([pipe, process.sentinel]), "the writer did not begin"
            kill_within(process, 0.03, choose)
            promised |= dict(m for m in heard(pipe) if m != "ready")
            running.append(start(put_for_ever, str(path), seed, swapped, kilobytes))
            seed += 1
            if kill % check_every == 0:
                for _, other in running:
                    promised |= dict(m for m in heard(other) if m != "ready")
                check(path, promised, kilobytes)
    finally:
        for process, _ in running:
            process.kill()
            process.join()
    for _, pipe in running:
        promised |= dict(m for m in heard(pipe) if m != "ready")
    check(path, promised, kilobytes)
    return promised


def check(path: Path, promised: dict[Ref, int], kilobytes: int) -> None:
    with Store(path) as store:
        visible = {entry.ref: int(entry.meta["seed"]) for entry in store.log()}
        lost = [ref for ref in promised if ref not in visible]
        assert not lost, f"{len(lost)} acknowledged models of {len(promised)} are lost"
        broken = 0
        for ref in visible:
            try:
                store.get(ref)  # compares every digest
            except StoreError:
                broken += 1
        assert not broken, f"{broken} of {len(visible)} visible models cannot be read"
        assert store.stats().broken == 0


def finish(path: Path, promised: dict[Ref, int], kilobytes: int = 8) -> None:
    """Nothing is damaged; the index can be made anew; torn tails are given back."""
    with Store(path) as store:
        before = {entry.ref for entry in store.log()}
        assert store.verify() == []
        store.rebuild()
        assert {entry.ref for entry in store.log()} >= before
        check_bits = random.Random(0).sample(sorted(promised), min(20, len(promised)))
        for ref in check_bits:
            parents = store.manifest(ref).parents
            expected = model(promised[ref], parents[0] if parents else None, kilobytes)
            assert store.get(ref).manifest() == expected.manifest()
        store.gc()
        stats = store.stats()
        packs = sum(f.stat().st_size for f in (path / "packs").iterdir())
        assert stats.dead_bytes <= 0.2 * (packs - stats.dead_bytes)
        assert store.verify() == []


def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    promised = kill_writers(tmp_path / "store", 30)
    assert len(promised) > 30
    finish(tmp_path / "store", promised)


def test_control_with_the_index_first_the_same_test_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="visible models cannot be read"):
        kill_writers(tmp_path / "store", 200, swapped=True, kilobytes=64)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_kills(tmp_path: Path) -> None:
    promised = kill_writers(tmp_path / "store", 500, check_every=50)
    print(f"500 kills, {len(promised)} models acknowledged, 0 lost, 0 unreadable")
    finish(tmp_path / "store", promised)
