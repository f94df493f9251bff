"""A reader written from docs/store-format.md alone: it uses nothing of elastix to read.

If this has to change for a store to be readable, the format has changed, and its version must.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from blake3 import blake3

from elastix.state import State, raw_bytes
from elastix.store import Store
from elastix.store.records import DTYPES
from elastix.testing.models import chain
from elastix.testing.store_contract import AWKWARD, child, every_dtype, small

PAGE = Path(__file__).parents[3] / "docs" / "store-format.md"
TENSOR, MODEL, TAG, RETIRED, SEAL = range(1, 6)


class Record(NamedTuple):
    kind: int
    digest: bytes
    clock: int
    payload: bytes


def records(pack: Path) -> Iterator[Record]:
    data = pack.read_bytes()
    at = 0
    while at + 64 <= len(data):
        head = data[at : at + 64]
        magic, version, kind = struct.unpack_from("<4sBB", head)
        (length,) = struct.unpack_from("<Q", head, 8)
        (clock,) = struct.unpack_from("<Q", head, 48)
        bound = blake3(head[:56] + struct.pack("<Q", at) + pack.name.encode()).digest()[:8]
        at += 64
        if magic != b"elxr" or head[56:] != bound or at + length > len(data):
            continue
        assert version == 1
        payload = data[at : at + length]
        assert blake3(payload).digest() == head[16:48]
        yield Record(kind, head[16:48], clock, payload)
        at += -(-length // 64) * 64


class Seen(NamedTuple):
    models: dict[str, dict[str, Any]]
    beside: dict[str, dict[str, Any]]
    tags: dict[str, str]
    payloads: dict[str, bytes]


def read(store: Path) -> Seen:
    found = [r for pack in sorted((store / "packs").glob("*.pack")) for r in records(pack)]
    seen = Seen({}, {}, {}, {r.digest.hex(): r.payload for r in found if r.kind == TENSOR})
    for record in sorted((r for r in found if r.kind != TENSOR), key=lambda r: r.clock):
        if record.kind == MODEL:
            manifest, beside = record.payload.split(b"\n")
            ref = blake3(manifest).hexdigest()
            seen.models[ref], seen.beside[ref] = json.loads(manifest), json.loads(beside)
        elif record.kind == TAG:
            body = json.loads(record.payload)
            seen.tags[body["tag"]] = body["ref"]
        elif record.kind == RETIRED:
            seen.models.pop(json.loads(record.payload)["ref"], None)
    return seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_the_page_is_enough_to_read_a_store(root: Path) -> None:
    states = [every_dtype(), State(AWKWARD, {"nested": {"a": [1, None]}}), small(1)]
    with Store(root) as store:
        refs = [store.put(state, score=0.5, signature=chain("a b")) for state in states]
        states.append(child(states[2], refs[2], "layer1.weight", {"n": 2}))
        refs.append(store.put(states[3]))
        gone = store.put(small(9))
        store.tag("first", refs[0])
        store.tag("best", refs[0])
        store.tag("best", refs[3])
        store.untag("first")
        store.retire(gone)
        owner = store.owner(refs[3], "layer0.weight")
    seen = read(root)
    assert list(seen.models) == refs
    assert {name: ref for name, ref in seen.tags.items() if ref} == {"best": refs[3]}
    assert seen.beside[refs[0]]["score"] == 0.5
    assert [layer[1] for layer in seen.beside[refs[0]]["signature"]] == ["a", "b"]
    assert seen.beside[refs[3]]["owners"]["layer0.weight"] == owner == refs[2]
    assert "layer1.weight" not in seen.beside[refs[3]]["owners"]
    for ref, state in zip(refs, states, strict=True):
        manifest = seen.models[ref]
        assert manifest["meta"] == dict(state.meta)
        assert manifest["parents"] == list(state.parents)
        assert manifest["tensors"].keys() == state.tensors.keys()
        for name, (dtype, sizes, digest) in manifest["tensors"].items():
            tensor = state.tensors[name].resolve_conj().resolve_neg()
            assert (f"torch.{dtype}", tuple(sizes)) == (str(tensor.dtype), tensor.shape)
            assert seen.payloads[digest] == raw_bytes(tensor).numpy().tobytes()
    (_, sizes, digest) = seen.models[refs[2]]["tensors"]["layer0.weight"]
    values = np.frombuffer(seen.payloads[digest], "<f4").reshape(sizes)
    assert torch.equal(torch.from_numpy(values.copy()), states[2].tensors["layer0.weight"])


def test_it_reads_what_a_crash_and_a_damaged_header_left(root: Path) -> None:
    with Store(root) as store:
        first, second = store.put(small(1)), store.put(small(2))
    (pack,) = (root / "packs").glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[3] ^= 1  # the header of the first tensor
    pack.write_bytes(data[:-64] + b"torn" * 40)  # the seal is gone, something else is there
    seen = read(root)
    assert set(seen.models) == {first, second}
    assert len(seen.payloads) == 5


def test_the_page_has_the_element_types_in_their_order():
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"The element types are {', '.join(DTYPES)}." in page
