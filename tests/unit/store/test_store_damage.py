"""The index is a cache: whatever of it is damaged, nothing wrong is read and nothing is lost."""

import os
import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from elastix.errors import Corrupt, StoreError
from elastix.state import Ref, State
from elastix.store import Store
from elastix.testing.models import chain
from elastix.testing.store_contract import child, same, small

States = dict[str, State]


def build(root: Path, models: int) -> States:
    """A closed store of so many models, each with a tag; by ref and by tag."""
    states: States = {}
    parent: Ref | None = None
    with Store(root) as store:
        for n in range(models):
            state = small(n, tensors=2, size=16)
            if parent is not None:
                state = child(states[parent], parent, "layer1.weight", {"n": n})
            parent = store.put(state, score=n / 8, signature=chain("a b"))
            store.tag(f"tag/{n}", parent)
            states[parent] = states[f"tag/{n}"] = state
    return states


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    root = tmp_path_factory.mktemp("built") / "store"
    return root, build(root, 6)


@pytest.fixture
def copy(built: tuple[Path, States], tmp_path: Path) -> tuple[Path, States]:
    shutil.copytree(built[0], tmp_path / "store")
    return tmp_path / "store", built[1]


def change(root: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(root / "index.sqlite") as sql:
        assert sql.execute(statement, values).rowcount > 0
    sql.close()


def check(store: Store, states: States) -> int:
    """What is read is right, or a typed error; how often it was right."""
    right = 0
    for name, state in states.items():
        try:
            assert same(store.get(name), state)
            right += 1
        except StoreError:
            pass
    for question in (store.log, store.tags, store.stats, store.verify):
        with suppress(StoreError):
            question()
    return right


def check_bits(
    root: Path, states: States, clean: bytes, bits: Sequence[int], writable: bool
) -> int:
    """The store with these bits of its index flipped; how many reads were right."""
    index = root / "index.sqlite"
    data = bytearray(clean)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    for end in ("-wal", "-shm"):
        index.with_name(index.name + end).unlink(missing_ok=True)
    index.write_bytes(data)
    try:
        with Store(root, read_only=not writable) as store:
            return check(store, states)
    except StoreError:
        return 0


@pytest.mark.parametrize("writable", [False, True])
def test_a_flipped_bit_of_the_index_never_gives_another_tensor(
    copy: tuple[Path, States], writable: bool
) -> None:
    root, states = copy
    clean = (root / "index.sqlite").read_bytes()
    used = [bit for bit in range(len(clean) * 8) if clean[bit // 8]]
    choose = random.Random(int(writable))
    right = sum(
        check_bits(root, states, clean, [bit], writable) for bit in choose.sample(used, 100)
    )
    assert right > 600  # of 1200: most bits are not those of a place


def in_small_pages(index: Path) -> None:
    """So that tables of a few rows have pages within pages, as those of large stores have."""
    sql = sqlite3.connect(index)
    for statement in ("journal_mode=DELETE", "page_size=512"):
        sql.execute(f"PRAGMA {statement}").fetchall()
    sql.execute("VACUUM")
    sql.execute("PRAGMA journal_mode=WAL").fetchall()
    sql.close()


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("writable", [False, True])
def test_every_bit_of_an_index(tmp_path: Path, writable: bool) -> None:
    """One at a time; in what seems to be empty space many, as long as nobody notices them."""
    root = tmp_path / "store"
    states = build(root, 8)
    in_small_pages(root / "index.sqlite")
    clean = (root / "index.sqlite").read_bytes()
    pending = [[at * 8 + bit] for at, byte in enumerate(clean) if byte for bit in range(8)]
    empty = [at for at, byte in enumerate(clean) if not byte]
    for bit in range(8):
        pending += [[at * 8 + bit for at in empty[n : n + 64]] for n in range(0, len(empty), 64)]
    runs = bits = right = 0
    while pending:
        flipped = pending.pop()
        found = check_bits(root, states, clean, flipped, writable)
        runs += 1
        if found < len(states) and len(flipped) > 1:
            half = len(flipped) // 2
            pending += [flipped[:half], flipped[half:]]
            continue
        bits += len(flipped)
        right += found
        if runs % 1000 == 0:
            print(f"{bits} of {len(clean) * 8} bits, {runs} runs", flush=True)
    assert bits == len(clean) * 8
    assert right > runs * len(states) / 2  # most bits are not those of a place
    print(f"{bits} bits flipped in {runs} runs, {right} reads were right, none was wrong")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE clock SET rev = NULL",
        "DELETE FROM clock",
        "UPDATE blobs SET offset = NULL",
        "UPDATE blobs SET length = 'many'",
        "UPDATE blobs SET digest = id",
        "UPDATE models SET ref = id",
        "UPDATE models SET score = 'high', time_s = 'late'",
        "UPDATE packs SET name = NULL",
        'UPDATE packs SET "end" = NULL',
        "UPDATE packs SET torn = 'yes'",
        "UPDATE tags SET ref = 7, seq = 'then'",
        "UPDATE parents SET parent = 1.5",
        "UPDATE models SET paths = 3, ids = 'x'",
    ],
)
def test_values_that_no_index_has_are_typed_errors(
    copy: tuple[Path, States], statement: str
) -> None:
    """As one bit in a record's header makes them, whatever the table's columns allow."""
    root, states = copy
    with sqlite3.connect(root / "index.sqlite") as sql:
        sql.execute("PRAGMA writable_schema=ON")
        sql.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    sql.close()
    change(root, statement)
    for read_only in (True, False):
        with suppress(StoreError), Store(root, read_only=read_only) as store:
            check(store, states)
            with suppress(StoreError):
                store.nearest(chain("a b"))
            if not read_only:
                for act in (
                    lambda: store.put(small(99)),
                    store.gc,
                    lambda: store.tag("t", "tag/0"),
                ):
                    with suppress(StoreError):
                        act()
    with Store(root) as store:
        store.rebuild()
        assert check(store, states) == len(states)
        assert store.verify() == []


def test_a_place_that_is_another_tensors_is_noticed(copy: tuple[Path, States]) -> None:
    root, states = copy
    with Store(root) as store:
        ref = store.log()[0].ref
    with sqlite3.connect(root / "index.sqlite") as sql:
        (first, second) = sql.execute("SELECT id, offset FROM blobs ORDER BY offset").fetchall()[:2]
        sql.execute("UPDATE blobs SET offset = ? WHERE id = ?", (first[1], second[0]))
    sql.close()
    with Store(root) as store:
        wrong = [name for name, state in states.items() if not readable(store, name, state)]
        assert wrong  # and a Corrupt for each, or `readable` would have failed
        assert any("another tensor" in damage.what for damage in store.verify())
        store.rebuild()
        assert store.verify() == []
        assert same(store.get(ref), states[ref])


def readable(store: Store, name: str, state: State) -> bool:
    try:
        assert same(store.get(name), state)
    except Corrupt:
        return False
    return True


def test_gc_asks_the_uses_and_not_their_count(copy: tuple[Path, States]) -> None:
    root, states = copy
    change(root, "UPDATE blobs SET refs = 0")
    with Store(root) as store:
        store.gc()
        assert check(store, states) == len(states)
        assert store.verify() == []  # counted anew


def test_gc_does_not_move_another_tensor(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
        store.retire(store.put(small(2, size=4000)))  # a poor pack, which gc writes anew
    change(
        root,
        "UPDATE blobs SET offset = (SELECT min(offset) FROM blobs) "
        "WHERE refs > 0 AND offset = (SELECT max(offset) FROM blobs WHERE refs > 0)",
    )
    with Store(root) as store:
        assert ["index is damaged" in why for why in store.gc().kept.values()] == [True]
        store.rebuild()
        assert same(store.get(ref), small(1))


def test_gc_keeps_all_while_packs_are_missing(copy: tuple[Path, States]) -> None:
    """An index that names one pack for another would call the other one useless."""
    root, states = copy
    other = "CASE substr(name, 1, 1) WHEN 'f' THEN 'e' ELSE 'f' END"
    change(root, f"UPDATE packs SET name = {other} || substr(name, 2)")
    with Store(root) as store:
        with pytest.raises(Corrupt, match="Nothing was collected"):
            store.gc()
        store.rebuild()
        store.gc()
        assert check(store, states) == len(states)


def test_every_damaged_page_is_got_out_of_by_a_rebuild(copy: tuple[Path, States]) -> None:
    root, states = copy
    index = root / "index.sqlite"
    clean = index.read_bytes()
    for at in range(0, len(clean), 4096):
        for page in (b"\0" * 4096, os.urandom(4096)):
            index.write_bytes(clean[:at] + page + clean[at + 4096 :])
            with Store(root) as store:
                store.rebuild()
                assert check(store, states) == len(states), at
                assert store.verify() == []


def damage(root: Path, what: bytes) -> None:
    for pack in (root / "packs").iterdir():
        data = pack.read_bytes()
        at = data.find(what)
        if at >= 0:
            pack.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            return
    raise AssertionError("no pack has it")


@pytest.mark.parametrize("found_by", ["verify", "get"])
def test_what_is_put_again_heals(tmp_path: Path, found_by: str) -> None:
    root = tmp_path / "store"
    state = State({"w": torch.arange(100.0), "v": torch.ones(3)}, {"mark": "here"})
    with Store(root) as store:
        ref = store.put(state)
    damage(root, state.tensors["w"].numpy().tobytes())
    damage(root, b'"mark":"here"')
    with Store(root) as store:
        if found_by == "verify":
            store.verify()
        else:
            with pytest.raises(Corrupt, match="manifest"):
                store.get(ref)
        store.put(state)
        if found_by == "get":  # the manifest hid the tensor
            with pytest.raises(Corrupt, match="'w'"):
                store.get(ref)
            store.put(State({"w": state.tensors["w"]}))
        assert same(store.get(ref), state)
        store.rebuild()
        assert same(store.get(ref), state)
        store.gc()
        assert same(store.get(ref), state)
        assert store.verify() == []
