"""The index is a cache: whatever of it is damaged, nothing wrong is read and nothing is lost."""

import gc
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from elastix.errors import Corrupt, StoreError
from elastix.state import Ref, State
from elastix.store import Store
from elastix.testing.models import chain
from elastix.testing.store_contract import child, same, small
from tests.processes import in_processes, own_copy

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


def put_index(root: Path, data: bytes | bytearray) -> None:
    index = root / "index.sqlite"
    for end in ("-wal", "-shm"):
        index.with_name(index.name + end).unlink(missing_ok=True)
    index.write_bytes(data)


def check_bits(
    root: Path, states: States, clean: bytes, bits: Sequence[int], writable: bool
) -> int:
    """The store with these bits of its index flipped; how many reads were right."""
    data = bytearray(clean)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    put_index(root, data)
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


def tiny(root: Path, models: int) -> States:
    """A closed store of so many models of one small tensor, each with a tag: soon read."""
    states: States = {}
    with Store(root) as store:
        for n in range(models):
            state = State({"w": torch.full((4,), float(n))}, {"n": n})
            ref = store.put(state, score=n / 8, signature=chain("a b"))
            store.tag(f"tag/{n}", ref)
            states[ref] = states[f"tag/{n}"] = state
    return states


PAGE = 512


def in_small_pages(index: Path) -> None:
    """So that tables of a few rows have pages within pages, as those of large stores have."""
    sql = sqlite3.connect(index)
    for statement in ("journal_mode=DELETE", f"page_size={PAGE}"):
        sql.execute(f"PRAGMA {statement}").fetchall()
    sql.execute("VACUUM")
    sql.execute("PRAGMA journal_mode=WAL").fetchall()
    sql.close()


def readers(root: Path, states: States, clean: bytes, page: int) -> States:
    """What is read by way of this page: what cannot be read without it, and one that can."""
    at = page * PAGE
    found: States = {}
    for instead in (bytes(PAGE), b"\xff" * PAGE):
        put_index(root, clean[:at] + instead + clean[at + PAGE :])
        try:
            with Store(root, read_only=True) as store:
                found |= {n: s for n, s in states.items() if not readable(store, n, s, StoreError)}
        except StoreError:
            return states
    others = [name for name in states if name not in found]
    return found | {name: states[name] for name in others[page % max(1, len(others)) :][:1]}


def test_a_page_that_leads_to_a_wrong_one_gives_no_other_model(tmp_path: Path) -> None:
    """By way of it SQLite finds rows of other keys, and does not notice."""
    root = tmp_path / "store"
    states = tiny(root, 50)
    in_small_pages(root / "index.sqlite")
    sql = sqlite3.connect(root / "index.sqlite")
    query = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_models_1'"
    top = (sql.execute(query).fetchone()[0] - 1) * PAGE
    sql.close()
    clean = (root / "index.sqlite").read_bytes()
    assert clean[top] == 2  # its keys are those of several pages
    cells = range(top + 12, top + 12 + 2 * int.from_bytes(clean[top + 3 : top + 5]), 2)
    ways = [top + 8, *(top + int.from_bytes(clean[cell : cell + 2]) for cell in cells)]
    right = sum(
        check_bits(root, states, clean, [(way + 3) * 8 + bit], writable=False)
        for way in ways
        for bit in range(7)
    )
    assert right > 0


class Tally(NamedTuple):
    """What came of one page: bits flipped, in how many runs, and how many reads were right."""

    page: int
    bits: int
    runs: int
    right: int
    reads: int


def check_page(root: Path, states: States, clean: bytes, writable: bool, page: int) -> Tally:
    """Every bit of a page, alone; of those in empty space many at once, until one is noticed."""
    here = range(page * PAGE, (page + 1) * PAGE)
    asked = readers(root, states, clean, page)
    pending = [[at * 8 + bit] for at in here if clean[at] for bit in range(8)]
    empty = [at for at in here if not clean[at]]
    for bit in range(8):
        pending += [[at * 8 + bit for at in empty[n : n + 64]] for n in range(0, len(empty), 64)]
    bits = runs = right = reads = 0
    while pending:
        flipped = pending.pop()
        found = check_bits(root, asked, clean, flipped, writable)
        runs += 1
        if found < len(asked) and len(flipped) > 1:
            half = len(flipped) // 2
            pending += [flipped[:half], flipped[half:]]
            continue
        bits += len(flipped)
        right += found
        reads += len(asked)
    return Tally(page, bits, runs, right, reads)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    ("make", "models", "writable"),
    [(build, 8, True), (tiny, 50, False)],
    ids=["8-writable", "50-read-only"],
)
def test_every_bit_of_an_index(
    tmp_path: Path, make: Callable[[Path, int], States], models: int, writable: bool
) -> None:
    """Pages are shared out to processes, each with a copy of the store."""
    root = tmp_path / "store"
    states = make(root, models)
    in_small_pages(root / "index.sqlite")
    clean = (root / "index.sqlite").read_bytes()

    def check(page: int) -> Tally:
        return check_page(own_copy(root), states, clean, writable, page)

    tallies = []
    for tally in in_processes(check, range(len(clean) // PAGE)):
        tallies.append(tally)
        print(f"{len(tallies)} of {len(clean) // PAGE} pages: {tally}", flush=True)
    bits, runs, right, reads = (sum(column) for column in list(zip(*tallies, strict=True))[1:])
    assert bits == len(clean) * 8
    assert right > reads / 4  # most bits of a page are not those of a place
    print(
        f"{bits} bits flipped in {runs} runs, {right} of {reads} reads were right, none was wrong"
    )


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


def readable(store: Store, name: str, state: State, error: type[StoreError] = Corrupt) -> bool:
    try:
        assert same(store.get(name), state)
    except error:
        return False
    return True


def test_an_error_that_is_kept_keeps_nothing_of_the_index(
    copy: tuple[Path, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Python complains when the error is forgotten and the index has been closed."""
    root, _ = copy
    change(root, "UPDATE models SET score = 'high'")
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with Store(root, read_only=True) as store, pytest.raises(StoreError) as kept:
        store.nearest(chain("a b"))
    del kept
    gc.collect()
    assert complaints == []


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


def older_index(root: Path, choose: random.Random) -> tuple[States, dict[str, Ref]]:
    """A store used for a while, whose index then is an earlier one; its models, and its tags."""
    states: States = {}
    tags: dict[str, Ref] = {}
    earlier = []
    for _ in range(6):
        with Store(root) as store:
            for act in choose.choices(["put", "tag", "retire", "gc"], [4, 1, 1, 1], k=4):
                spare = [ref for ref in states if ref not in tags.values()]
                if act == "put":
                    state = small(choose.randrange(10**6), tensors=2, size=choose.choice([4, 2000]))
                    states[store.put(state)] = state
                elif act == "tag" and states:
                    name = f"t{choose.randrange(3)}"
                    tags[name] = choose.choice(list(states))
                    store.tag(name, tags[name])
                elif act == "retire" and spare:
                    store.retire(spare[0])
                    del states[spare[0]]
                elif act == "gc":
                    store.gc()
        earlier.append((root / "index.sqlite").read_bytes())
    put_index(root, choose.choice(earlier[:-1]))
    return states, tags


@pytest.mark.parametrize("seed", range(8))
def test_who_only_reads_sees_what_an_older_index_does_not_say(tmp_path: Path, seed: int) -> None:
    """One of a backup, or of before a power cut: the packs say what came later."""
    root = tmp_path / "store"
    states, tags = older_index(root, random.Random(seed))
    with Store(root, read_only=True) as reader:
        assert {model.ref for model in reader.log()} == set(states)
        assert all(same(reader.get(ref), state) for ref, state in states.items())
        assert reader.tags() == tags


def test_who_reads_a_copy_of_the_index_sees_what_comes_later(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        store.put(small(1))
        store.put(small(2))
        early = (root / "index.sqlite").read_bytes()
        store.put(small(3))
    put_index(root, early)
    with Store(root, read_only=True) as reader:
        assert len(reader.log()) == 3
        with Store(root) as writer:
            ref = writer.put(small(4))
            assert same(reader.get(ref), small(4))
            writer.tag("late", ref)
            assert reader.tags() == {"late": ref}
            writer.put(small(5))
            assert len(reader.log()) == 5


def damaged_somehow(clean: bytes, choose: random.Random) -> bytes:
    """A file with bytes changed, zeroed, of noise, cut off, appended, or pages in another order."""
    data = bytearray(clean)
    at, size = choose.randrange(len(data)), choose.randrange(1, 9000)
    match choose.randrange(6):
        case 0:
            for _ in range(choose.choice([1, 10, 1000])):
                data[choose.randrange(len(data))] = choose.randrange(256)
        case 1:
            data[at : at + size] = bytes(len(data[at : at + size]))
        case 2:
            data[at : at + size] = choose.randbytes(len(data[at : at + size]))
        case 3:
            del data[at:]
        case 4:
            data += choose.randbytes(size)
        case 5:
            pages = [data[at : at + 4096] for at in range(0, len(data), 4096)]
            choose.shuffle(pages)
            data = bytearray(b"".join(pages))
    return bytes(data)


def is_got_out_of(root: Path, states: States, damaged: bytes) -> None:
    put_index(root, damaged)
    with Store(root) as store:
        store.rebuild()
        assert check(store, states) == len(states)
        assert store.verify() == []


def test_an_index_damaged_somehow_is_got_out_of_by_a_rebuild(copy: tuple[Path, States]) -> None:
    root, states = copy
    clean = (root / "index.sqlite").read_bytes()
    choose = random.Random(7)
    for _ in range(60):
        is_got_out_of(root, states, damaged_somehow(clean, choose))


def test_an_index_that_says_it_is_not_to_be_written(copy: tuple[Path, States]) -> None:
    """By a byte of its header: SQLite then takes it for one of a later version."""
    root, states = copy
    clean = (root / "index.sqlite").read_bytes()
    is_got_out_of(root, states, clean[:18] + b"\x07" + clean[19:])


def test_an_index_without_a_clock_while_there_is_something_to_adopt(
    copy: tuple[Path, States],
) -> None:
    root, states = copy
    with sqlite3.connect(root / "index.sqlite") as sql:
        sql.execute("PRAGMA writable_schema=ON")
        sql.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    sql.close()
    change(root, "UPDATE clock SET rev = NULL")
    change(root, 'UPDATE packs SET "end" = 0')
    with sqlite3.connect(root / "index.sqlite") as sql:
        sql.execute("PRAGMA writable_schema=ON")
        sql.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'rev INTEGER', 'rev INTEGER NOT NULL')"
        )
    sql.close()
    is_got_out_of(root, states, (root / "index.sqlite").read_bytes())


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


def test_what_is_put_again_in_shares_heals(tmp_path: Path) -> None:
    """A checkpoint of several workers, of which a frozen tensor was found damaged before."""
    root = tmp_path / "store"
    state = State({"frozen": torch.arange(100.0), "w": torch.ones(3)})
    with Store(root) as store:
        ref = store.put(state)
    damage(root, state.tensors["frozen"].numpy().tobytes())
    with Store(root) as store:
        with pytest.raises(Corrupt, match="'frozen'"):
            store.get(ref)
        shares = [store.put_share(State({name: t})) for name, t in state.tensors.items()]
        assert [len(share.places) for share in shares] == [1, 0]
        later = store.put_shares(shares, meta={"step": 2})
        assert same(store.get(later), State(state.tensors, {"step": 2}))
        assert same(store.get(ref), state)
        store.gc()
        assert store.verify() == []


def test_an_index_that_somebody_has_locked_is_not_read_without_its_log(
    copy: tuple[Path, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the log alone would be missing, and what comes later as well."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **{**o, "timeout": 0.0}))
    holder = connect(copy[0] / "index.sqlite", isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE clock SET seq = seq + 1")
    with pytest.raises(StoreError, match="SQLITE_BUSY"):
        Store(copy[0], read_only=True)
    holder.execute("COMMIT")
    holder.close()
    with Store(copy[0], read_only=True) as store:
        assert check(store, copy[1])


def test_a_reader_that_could_not_look_again_goes_on_and_looks_later(
    copy: tuple[Path, States], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy[0]
    with Store(root, read_only=True) as reader:
        ledger, opens = reader.ledger, reader.ledger._open_read_only
        monkeypatch.setattr(ledger, "_is_behind", lambda: True)

        def locked() -> None:
            raise StoreError("it is locked")

        monkeypatch.setattr(ledger, "_open_read_only", locked)
        with pytest.raises(StoreError, match="locked"):
            reader.tags()
        assert check(reader, copy[1]) == len(copy[1]), "by what it knew"
        monkeypatch.setattr(ledger, "_open_read_only", opens)
        assert len(reader.tags()) == 6
