"""Laws 3, 4, 5 and 7 at full size: many writers, gc in the middle of everything, big DAGs."""

from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from elastix.state import State
from elastix.store import Store
from elastix.testing.store_contract import retire_everything, same
from tests.chaos.store_processes import churn, model, put_some, read_for_ever, start


def say(pipes: list, message: str) -> None:
    for pipe in pipes:
        pipe.send(message)


def answers(pipes: list, seconds: float) -> list:
    found = []
    for pipe in pipes:
        assert wait([pipe], timeout=seconds), "no answer"
        found.append(pipe.recv())
    return found


@pytest.mark.timeout(240)
def test_sixteen_writers_with_half_in_common(tmp_path: Path) -> None:
    path = tmp_path / "store"
    running = [start(put_some, str(path), seed, 5) for seed in range(16)]
    pipes = [pipe for _, pipe in running]
    assert answers(pipes, 100) == ["ready"] * 16
    say(pipes, "go")
    results = answers(pipes, 100)
    errors = [result for result in results if isinstance(result, str)]
    assert errors == []
    for process, _ in running:
        process.join()
    with Store(path) as store:
        expected = {
            f"{seed * 1000 + n}": model(seed * 1000 + n) for seed in range(16) for n in range(5)
        }
        manifests = [state.manifest() for state in expected.values()]
        assert {r for result in results for r in result} == {m.ref for m in manifests}
        counts: Counter[bytes] = Counter()
        for manifest in manifests:
            counts.update({bytes.fromhex(info.digest) for info in manifest.tensors.values()})
        rows = store._ledger.index.sql.execute("SELECT digest, refs FROM blobs").fetchall()
        assert len(rows) == len(counts) == 4 + 16 * 5 * 4
        assert dict(rows) == counts
        assert store.verify() == []
        store.gc()
        stats = store.stats()
        packs = sum(f.stat().st_size for f in (path / "packs").iterdir())
        assert packs <= 1.2 * (packs - stats.dead_bytes)


def collect_under_load(path: Path, writers: int, rounds: int) -> tuple[int, int]:
    """Law 4. Returns how many collections ran (some at least) and how many bytes they gave back."""
    running = [start(churn, str(path), seed, rounds) for seed in range(writers)]
    readers = [start(read_for_ever, str(path)) for _ in range(2)]
    pipes = [pipe for _, pipe in running]
    assert answers(pipes + [pipe for _, pipe in readers], 100) == ["ready"] * (writers + 2)
    collections = freed = 0
    with Store(path) as store:
        while collections < 4 or not all(pipe.poll() for pipe in pipes):
            freed += store.gc().freed_bytes
            collections += 1
        assert answers(pipes, 60) == ["done"] * writers
        say(pipes, "stop")
        refs = [ref for result in answers(pipes, 60) for ref in result]
        assert {entry.ref for entry in store.log()} == set(refs)
        say([pipe for _, pipe in readers], "stop")
        for answer in answers([pipe for _, pipe in readers], 60):
            assert answer[0] == "unchanged"
            assert answer[1] > 0
        for process, _ in running + readers:
            process.join()
        freed += store.gc().freed_bytes
        for entry in store.log():
            seed = int(entry.meta["seed"])
            parent = entry.parents[0] if entry.parents else None
            assert same(store.get(entry.ref), model(seed, parent))
        assert store.verify() == []
        packs = sum(f.stat().st_size for f in (path / "packs").iterdir())
        live = packs - store.stats().dead_bytes
        assert packs <= 1.2 * live, f"{packs} bytes in packs for {live} that are needed"
    return collections, freed


@pytest.mark.timeout(240)
def test_gc_against_live_readers_and_writers(tmp_path: Path) -> None:
    _, freed = collect_under_load(tmp_path / "store", writers=3, rounds=40)
    assert freed > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gc_against_live_readers_and_writers_for_long(tmp_path: Path) -> None:
    print(collect_under_load(tmp_path / "store", writers=6, rounds=500))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_models_retired_in_random_order(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        retire_everything(store, models=10_000, check_every=1000, seed=7)
        print(store.stats())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tensor_over_four_gibibytes(tmp_path: Path) -> None:
    big = torch.arange((4 << 30) // 8 + 1000, dtype=torch.int64)
    with Store(tmp_path / "store") as store:
        ref = store.put(State({"big": big, "small": torch.ones(3)}))
        back = store.get(ref).tensors
        assert torch.equal(back["big"], big)
        assert torch.equal(back["small"], torch.ones(3))
        assert store.verify() == []
