"""Law 6: any flipped bit is found and named; hostile files are refused, the rest is readable."""

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from elastix.errors import ConfigError, Corrupt, NotFound, StateError, StoreError, TooNew
from elastix.state import Manifest, Ref, State, TensorInfo
from elastix.store import Store
from elastix.store import records as records_module
from elastix.store.local_packs import LocalPacks
from elastix.store.records import Header, Kind, Model, padded, parse_header, scan
from elastix.testing.models import chain
from elastix.testing.store_contract import child, same, small
from tests.processes import in_processes, own_copy


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Ref, State]]:
    """A closed store of three models and a tag, in one pack."""
    root = tmp_path_factory.mktemp("built") / "store"
    with Store(root) as store:
        first = small(1, size=10)
        ref = store.put(first, signature=chain("a b c"), score=0.5)
        second = child(first, ref, "layer1.weight", {"n": 2})
        other = store.put(second)
        third = small(3, size=50)
        states = {ref: first, other: second, store.put(third): third}
        store.tag("best", other)
    return root, states


def the_pack(root: Path) -> Path:
    (pack,) = (root / "packs").glob("*.pack")
    return pack


def records(pack: Path) -> Iterator[tuple[int, Header]]:
    data, at = pack.read_bytes(), 0
    while at < len(data):
        header = parse_header(data[at : at + 64], pack.name, at)
        yield at, header
        at += 64 + padded(header.length)


def check_flip(root: Path, states: dict[Ref, State], at: int, bit: int) -> None:
    pack = the_pack(root)
    clean = pack.read_bytes()
    data = bytearray(clean)
    data[at] ^= 1 << bit
    pack.write_bytes(data)
    try:
        with Store(root, read_only=True) as store:
            damage = store.verify()
            assert damage, f"bit {bit} of byte {at} is not found"
            hurt = {d.model for d in damage} - {None}
            for ref, state in states.items():
                try:
                    assert same(store.get(ref), state)
                except Corrupt as error:
                    assert ref[:12] in str(error)  # noqa: PT017 - both outcomes are judged
                    assert ref in hurt
                    named = {d.tensor for d in damage if d.model == ref}
                    assert any(name is None or f"'{name}'" in str(error) for name in named)  # noqa: PT017
    finally:
        pack.write_bytes(clean)


def test_flipped_bits_are_found_and_named(built: tuple[Path, dict[Ref, State]]) -> None:
    root, states = built
    choose = random.Random(1)
    pack = the_pack(root)
    for at, header in records(pack):  # each part of each record
        if header.kind == Kind.SEAL:
            continue
        places = [at, at + 4, at + 8, at + 20, at + 60, at + 64 + header.length // 2]
        for place in places:
            check_flip(root, states, place, choose.randrange(8))
        if padded(header.length) > header.length:
            check_flip(root, states, at + 64 + padded(header.length) - 1, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bit_of_a_pack(built: tuple[Path, dict[Ref, State]], tmp_path: Path) -> None:
    root, states = built
    shutil.copytree(root, tmp_path / "store")
    size = max(at for at, header in records(the_pack(root)) if header.kind == Kind.SEAL)

    def check_byte(at: int) -> None:
        for bit in range(8):
            check_flip(own_copy(tmp_path / "store"), states, at, bit)

    for _ in in_processes(check_byte, range(size)):
        pass
    print(f"{size * 8} bits flipped, every one found")


def test_a_read_names_model_and_tensor(
    built: tuple[Path, dict[Ref, State]], tmp_path: Path
) -> None:
    root, states = built
    copy = tmp_path / "store"
    shutil.copytree(root, copy)
    pack = the_pack(copy)
    first = next(at for at, header in records(pack) if header.kind == Kind.TENSOR)
    data = bytearray(pack.read_bytes())
    data[first + 64] ^= 1
    pack.write_bytes(data)
    one, two, three = states
    with Store(copy) as store:
        for ref in (one, two):  # both have it
            with pytest.raises(Corrupt, match=rf"'layer0.weight' of model {ref[:12]}"):
                store.get(ref)
            part = store.get(ref, "layer2*").tensors["layer2.weight"]
            assert torch.equal(part, states[ref].tensors["layer2.weight"])
        assert same(store.get(three), states[three])
        assert {(d.model, d.tensor) for d in store.verify()} == {
            (one, "layer0.weight"),
            (two, "layer0.weight"),
        }
        store.put(small(9))


def fuzz(root: Path, states: dict[Ref, State], work: Path, files: int, seed: int) -> int:
    """Damage a pack in many ways; nothing but StoreErrors, and never a wrong bit.

    Returns:
        How many models were read.
    """
    choose = random.Random(seed)
    clean = the_pack(root).read_bytes()
    (work / "packs").mkdir(parents=True)
    pack = work / "packs" / the_pack(root).name
    readable = 0
    for _ in range(files):
        pack.write_bytes(damaged(clean, choose))
        with Store(work, read_only=True) as store:
            store.verify()
            assert {entry.ref for entry in store.log()} <= set(states)
            for ref, state in states.items():
                try:
                    assert same(store.get(ref), state)
                    readable += 1
                except (NotFound, Corrupt):
                    pass
    return readable


def damaged(clean: bytes, choose: random.Random) -> bytes:
    data = bytearray(clean)
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(data) + 1)
        kind = choose.randrange(5)
        if kind == 0:
            data[at : at + 8] = choose.randbytes(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at : at + 64] = data[choose.randrange(len(data) + 1) :][:64]
        elif kind == 3:
            data[at:at] = choose.randbytes(choose.choice([1, 64, 200]))
        else:
            del data[at : at + choose.choice([1, 64, 200])]
        if not data:
            break
    return bytes(data)


def test_fuzzed_packs(built: tuple[Path, dict[Ref, State]], tmp_path: Path) -> None:
    assert fuzz(*built, tmp_path / "work", files=400, seed=1) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_fuzzed_packs(
    built: tuple[Path, dict[Ref, State]], tmp_path: Path
) -> None:
    def some(seed: int) -> int:
        return fuzz(*built, tmp_path / f"work{seed}", files=1000, seed=seed)

    readable = 0
    for part, found in enumerate(in_processes(some, range(2, 102)), 1):
        readable += found
        print(f"{part * 1000} packs, {readable} models read", flush=True)
    print(f"100000 fuzzed packs, {readable} models read from them, all bit-exact")


# -------------------------------------------------------------- files that are valid and hostile


def forge(root: Path, *parts: tuple[Header, bytes]) -> Path:
    """A pack with right checksums and any content."""
    (root / "packs").mkdir(parents=True, exist_ok=True)
    pack = root / "packs" / f"{len(list((root / 'packs').iterdir())):016x}-000001.pack"
    data = b""
    for header, payload in parts:
        data += header.pack(pack.name, len(data)) + payload.ljust(padded(len(payload)), b"\0")
    pack.write_bytes(data)
    return pack


def model_record(payload: bytes) -> tuple[Header, bytes]:
    return Header(Kind.MODEL, len(payload), blake3(payload).digest(), seq=1), payload


def tensor_record(payload: bytes) -> tuple[Header, bytes]:
    return Header(Kind.TENSOR, len(payload), blake3(payload).digest()), payload


def hostile_models() -> dict[str, bytes]:
    digest = blake3(b"x" * 8).hexdigest()
    rest = b'{"owners":{},"score":null,"signature":null,"tied":{},"time_s":0}'

    def model(tensors: str, rest: bytes = rest, meta: str = "{}", parents: str = "[]") -> bytes:
        return f'{{"meta":{meta},"parents":{parents},"tensors":{tensors}}}\n'.encode() + rest

    one = f'{{"a":["float32",[2],"{digest}"]}}'
    return {
        "huge shape": model(f'{{"a":["float32",[9223372036854775807,4],"{digest}"]}}'),
        "larger shape": model(f'{{"a":["float32",[{2**63}],"{digest}"]}}'),
        "negative shape": model(f'{{"a":["float32",[-2],"{digest}"]}}'),
        "wrong size": model(f'{{"a":["float64",[2],"{digest}"]}}'),
        "no dtype": model(f'{{"a":["__class__",[2],"{digest}"]}}'),
        "object dtype": model(f'{{"a":["object",[2],"{digest}"]}}'),
        "missing blob": model(f'{{"a":["float32",[2],"{"0" * 64}"]}}'),
        "short digest": model('{"a":["float32",[2],"00"]}'),
        "parent": model(one, parents='["../../etc"]'),
        "meta": model(one, meta="[]"),
        "deep": model(one, meta='{"a":' * 5000 + "1" + "}" * 5000),
        "too deep": model(one, meta='{"a":' * 101 + "1" + "}" * 101),
        "tied": model(one, rest=rest.replace(b'"tied":{}', b'"tied":{"a":"b"}')),
        "score": model(one, rest=rest.replace(b'"score":null', b'"score":1' + b"0" * 400)),
        "owners": model(one, rest=rest.replace(b'"owners":{}', b'"owners":{"a":"../x"}')),
        "signature": model(one, rest=rest.replace(b'"signature":null', b'"signature":[[1,2]]')),
        "not json": b"\xff\xfe\n{}",
        "one line": b"{}",
        "empty": b"",
        "lists": b"[]\n[]",
    }


@pytest.mark.parametrize("name", hostile_models())
def test_hostile_models_leave_the_rest_readable(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
    forge(root, tensor_record(b"x" * 8), model_record(hostile_models()[name]))
    (root / "index.sqlite").unlink()
    with Store(root) as store:
        assert same(store.get(ref), small(1))
        for entry in store.log():
            if entry.ref != ref:
                with pytest.raises(StoreError, match=f"'a' of model {entry.ref[:12]}"):
                    store.get(entry.ref)
        store.verify()
        store.put(small(2))
        assert store.gc() is not None
        assert same(store.get(ref), small(1))


def small_record(kind: Kind, body: object, seq: int = 5) -> tuple[Header, bytes]:
    payload = json.dumps(body).encode()
    return Header(kind, len(payload), blake3(payload).digest(), seq=seq), payload


def hostile_records() -> dict[str, tuple[Header, bytes]]:
    ref = "ab" * 32
    return {
        "retired nothing": small_record(Kind.RETIRED, {"ref": None, "parents": []}),
        "retired without parents": small_record(Kind.RETIRED, {"ref": ref}),
        "retired parent": small_record(Kind.RETIRED, {"ref": ref, "parents": [None]}),
        "retired list": small_record(Kind.RETIRED, []),
        "tag without name": small_record(Kind.TAG, {"ref": ref}),
        "tag number": small_record(Kind.TAG, {"ref": ref, "tag": 5}),
        "tag list": small_record(Kind.TAG, []),
        "tag ref": small_record(Kind.TAG, {"ref": 5, "tag": "x"}),
        "infinite layer": model_record(
            hostile_models()["signature"].replace(
                b"[[1,2]]", b'[["n","k",[["t",[Infinity]]],"ff"]]'
            )
        ),
    }


@pytest.mark.parametrize("name", hostile_records())
def test_malformed_records_are_skipped(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
        store.tag("best", ref)
    forge(root, tensor_record(b"x" * 8), hostile_records()[name])
    for read_only in (True, False):
        (root / "index.sqlite").unlink(missing_ok=not read_only)
        with Store(root, read_only=read_only) as store:
            assert same(store.get("best"), small(1))
            assert [entry.ref for entry in store.log()] == [ref]
            store.verify()


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0, *[2**31] * 10], [1] * 100 + [2]])
def test_shapes_that_no_tensor_has(tmp_path: Path, shape: list[int]) -> None:
    root = tmp_path / "store"
    payload = b"x" * 8 if 0 not in shape else b""
    digest = blake3(payload).hexdigest()
    body = Model(Manifest({"a": TensorInfo("float32", tuple(shape), digest)}, {})).to_bytes()
    forge(root, tensor_record(payload), model_record(body))
    with Store(root) as store:
        for entry in store.log():
            assert store.get(entry.ref).tensors["a"].shape == torch.Size(shape)
        assert len(store.log()) == (0 not in shape)


@pytest.mark.parametrize("seq", [2**63 - 1, 2**63 - 2])
def test_a_clock_at_its_end_is_said_to_be(tmp_path: Path, seq: int) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
    forge(root, small_record(Kind.TAG, {"ref": ref, "tag": "late"}, seq))
    with Store(root) as store:
        for change in (lambda: store.tag("x", ref), lambda: store.put(small(2))):
            with pytest.raises(Corrupt, match="clock"):
                change()
        assert same(store.get("late"), small(1))
        assert store.verify() == []


def test_the_end_of_a_torn_tensor_is_looked_for_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer killed inside a large tensor leaves GiBs without a header."""
    parsed = []

    def counting(raw: bytes, pack: str, at: int) -> Header:
        parsed.append(at)
        return parse_header(raw, pack, at)

    monkeypatch.setattr(records_module, "parse_header", counting)
    size = 64 << 20
    header = Header(Kind.SEAL, 0, blake3(b"").digest())
    last = size - 64
    for filling in (b"\0" * 64, b"elx" + bytes(61), b" elxr" + bytes(59)):
        chunk = filling * ((1 << 20) // 64)

        def read(offset: int, length: int, chunk: bytes = chunk) -> bytes:
            data = chunk[offset % 64 :][:length]
            return (
                data[: last - offset] + header.pack("p", last) if offset + length > last else data
            )

        parsed.clear()
        (found,) = scan(read, "p", 0, size)
        assert found[0].offset == size
        assert len(parsed) < 1000


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    root = tmp_path / "store"
    forge(root, model_record(hostile_models()["missing blob"]))
    with Store(root) as store:
        assert store.log() == []
        (damage,) = store.verify()
        assert damage.tensor == "a"
        assert damage.model is not None
        with pytest.raises(Corrupt, match="'a'"):
            store.get(damage.model)


def test_lengths_and_overlaps(tmp_path: Path) -> None:
    root = tmp_path / "store"
    big = Header(Kind.TENSOR, 2**63, b"\0" * 32)
    forge(root, (big, b""), tensor_record(b"y" * 8))
    forge(root, (Header(Kind.TENSOR, 2**63 - 1, b"\0" * 32), b""), tensor_record(b"y" * 8))
    long = Header(Kind.TENSOR, 64 + 8, blake3(b"whatever").digest())
    forge(root, (long, b""), tensor_record(b"z" * 8))
    late = Header(Kind.TAG, 8, blake3(b"12345678").digest(), seq=2**64 - 1)
    forge(root, (late, b"12345678"))
    with Store(root) as store:
        assert store.put(small(1))
        assert same(store.get(store.log()[0].ref), small(1))
        store.verify()


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        store.put(small(1))
    pack = the_pack(root)
    data = bytearray(pack.read_bytes())
    data[4] = 2
    data[56:64] = blake3(data[:56] + bytes(8) + pack.name.encode()).digest(8)
    pack.write_bytes(data)
    (root / "index.sqlite").unlink()
    with pytest.raises(TooNew, match="version 2"):
        Store(root)
    with pytest.raises(TooNew):
        Store(root, read_only=True)


def test_nothing_leads_out_of_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
    outside = tmp_path / "0123456789abcdef-000001.pack"
    shutil.copy(the_pack(root), outside)
    (root / "packs" / outside.name).symlink_to(outside)
    assert outside.name not in LocalPacks(root).sizes()
    with pytest.raises(NotFound):
        LocalPacks(root).read(outside.name, 0, 64)
    with sqlite3.connect(root / "index.sqlite") as sql:
        sql.execute("UPDATE packs SET name = ?", (f"../../{outside.name}",))
    sql.close()
    for read_only in (True, False):  # what is there is read, whatever this index says
        with Store(root, read_only=read_only) as store:
            assert same(store.get(ref), small(1))
    with pytest.raises((Corrupt, NotFound)):
        LocalPacks(root).read(f"../../{outside.name}", 0, 64)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "owner.lock", "reserve"])
@pytest.mark.parametrize("read_only", [False, True])
def test_nobody_waits_at_a_pipe(tmp_path: Path, name: str, read_only: bool) -> None:
    with Store(tmp_path) as store:
        store.put(small(1))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(Corrupt, match=rf"{name} is no file.*Remove it"):
        Store(tmp_path, read_only=read_only)


def test_nobody_waits_at_a_pipe_in_the_place_of_a_pack(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        ref = store.put(small(1))
    (pack,) = (tmp_path / "packs").iterdir()
    pack.unlink()
    os.mkfifo(pack)
    with Store(tmp_path) as store:
        with pytest.raises(Corrupt, match=ref[:12]):
            store.get(ref)
        assert store.verify()
        assert LocalPacks(tmp_path).alive(pack.name) is False


def test_a_reader_closes_what_is_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.13 on each one that is left open is a warning in the user's program."""
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
    (root / "index.sqlite").write_bytes(b"no index" * 1000)
    opened: set[sqlite3.Connection] = set()

    class Watched(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.add(self)

        def close(self) -> None:
            opened.discard(self)
            super().close()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    with Store(root, read_only=True) as store:
        assert same(store.get(ref), small(1))
    assert not opened


def test_an_unreadable_index_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(small(1))
        store.tag("best", ref)
    (root / "index.sqlite").write_bytes(b"this is no database" * 1000)
    with Store(root) as store:
        assert same(store.get("best"), small(1))


def test_an_index_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with Store(root) as store:
        store.put(small(1))
    with sqlite3.connect(root / "index.sqlite") as sql:
        sql.execute("PRAGMA user_version = 99")
    sql.close()
    before = (root / "index.sqlite").read_bytes()
    for read_only in (False, True):
        with pytest.raises(TooNew, match="version 99"):
            Store(root, read_only=read_only)
    assert (root / "index.sqlite").read_bytes() == before
    with pytest.raises(TooNew):  # it holds no lock either
        Store(root)


def test_metadata_that_are_no_json_in_the_index_hide_no_other_model(tmp_path: Path) -> None:
    """Indexes that were written before NaN was kept out of them are still about."""
    root = tmp_path / "store"
    with Store(root) as store:
        ref = store.put(State(small(1).tensors, {"campaign": "c"}), signature=chain("a b"))
        odd = store.put(State(small(2).tensors, {"campaign": "c"}), signature=chain("a b"))
    with sqlite3.connect(root / "index.sqlite") as sql:
        change = "UPDATE models SET meta = ? WHERE ref = ?"
        sql.execute(change, ('{"campaign": "c", "loss": NaN}', bytes.fromhex(odd)))
    sql.close()
    with Store(root, read_only=True) as store:
        found = store.nearest(chain("a b"), where={"campaign": "c"})
    assert found is not None
    assert found.ref == ref


def test_what_is_no_store_is_not_taken_for_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="is a file"):
            Store(file, read_only=read_only)
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFound, match="neither packs nor an index"):
        Store(tmp_path / "folder", read_only=True)
    assert not any((tmp_path / "folder").iterdir())


def test_a_record_must_be_where_it_was_written(tmp_path: Path) -> None:
    header = Header(Kind.TENSOR, 5, b"\1" * 32, dtype="bool")
    raw = header.pack("a", 64)
    assert parse_header(raw, "a", 64) == header
    for pack, at in (("a", 0), ("b", 64)):
        with pytest.raises(Corrupt):
            parse_header(raw, pack, at)


def test_model_records_survive_a_round_trip() -> None:
    manifest = Manifest({"ü/\ud800": TensorInfo("bool", (0, 3), "0" * 64)}, {"x": float("nan")})
    model = Model(manifest, signature=chain("a b").to_json(), score=1.0, time_s=2.0)
    again = Model.from_bytes(model.to_bytes())
    assert again.to_bytes() == model.to_bytes()
    assert json.loads(again.to_bytes().split(b"\n")[1])["score"] == 1.0


def test_metadata_is_nested_a_hundred_levels_deep_and_no_more(tmp_path: Path) -> None:
    """Else it depends on the Python, and on who calls, what another process can read."""
    meta: dict[str, object] = {}
    for _ in range(99):
        meta = {"a": meta}
    with Store(tmp_path / "store") as store:
        ref = store.put(State(small(1).tensors, meta))
        assert store.get(ref).meta == meta
        with pytest.raises(StateError, match=r"more than 100 levels deep\. Nothing was stored"):
            store.put(State(small(1).tensors, {"a": meta}))
