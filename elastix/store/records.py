"""The record: the one unit that packs are made of. A 64-byte header and a payload.

Not here: files. Everything below works on bytes, so that it can be fuzzed without a disk.

Invariant: a header is accepted only at the offset and in the pack it was written for, and only
whole; a payload only with the digest that its header names. docs/store-format.md is the page to
write another reader from.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from blake3 import blake3

from elastix.errors import Corrupt, TooNew
from elastix.state import Manifest, Ref, TensorInfo

ALIGNMENT = 64
VERSION = 1
_MAGIC = b"elxr"
_LAYOUT = struct.Struct("<4sBBBxQ32sQ8s")
_SUM_AT = 56
_HOP_BYTES = 1 << 14  # read at once from header to header
_SEARCH_BYTES = 1 << 20  # read at once where a header has to be looked for
LAST_SEQ = 2**63 - 1
"""The clock's end; a record that says so leaves no later moment to write at."""


class Kind(IntEnum):
    """What a record's payload is."""

    TENSOR = 1
    MODEL = 2
    TAG = 3
    RETIRED = 4
    SEAL = 5


DTYPES = tuple(
    """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2
    """.split()  # noqa: SIM905 - words read better
)
"""Names of element types; a header holds the place in this list, counted from 1 (0: none)."""


class Place(NamedTuple):
    """Where a payload stands: pack, first byte, number of bytes."""

    pack: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after the record, padding included."""
        return self.offset + padded(self.length)


@dataclass(frozen=True)
class Header:
    """The 64 bytes before a payload. `seq` orders models, tags and retirements; 0 for tensors."""

    kind: Kind
    length: int
    digest: bytes
    seq: int = 0
    dtype: str = ""

    def pack(self, pack: str, at: int) -> bytes:
        """The header's bytes, bound to byte `at` of `pack`."""
        code = DTYPES.index(self.dtype) + 1 if self.dtype else 0
        body = _LAYOUT.pack(
            _MAGIC, VERSION, self.kind, code, self.length, self.digest, self.seq, b""
        )
        return body[:_SUM_AT] + _checksum(body, pack, at)


def _checksum(header: bytes, pack: str, at: int) -> bytes:
    return blake3(header[:_SUM_AT] + at.to_bytes(8, "little") + pack.encode()).digest(8)


def padded(length: int) -> int:
    """`length` rounded up to the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def parse_header(raw: bytes, pack: str, at: int) -> Header:
    """The header at byte `at` of `pack`.

    Raises:
        Corrupt: these 64 bytes are no header, or are one of another place.
        TooNew: they are a header of a later version.
    """
    if len(raw) != ALIGNMENT or raw[:4] != _MAGIC:
        raise Corrupt(f"{pack} has no record at byte {at}.")
    _, version, kind, code, length, digest, seq, checksum = _LAYOUT.unpack(raw)
    if checksum != _checksum(raw, pack, at):
        raise Corrupt(f"the record's header at byte {at} of {pack} is damaged.")
    if version > VERSION or kind not in Kind.__members__.values():
        raise TooNew(
            f"{pack} has a record of version {version}, kind {kind} at byte {at}; this elastix "
            f"reads up to version {VERSION}. Nothing was changed. Read it with a later elastix."
        )
    if max(length, seq) > LAST_SEQ:
        raise Corrupt(f"the record's header at byte {at} of {pack} says {length} bytes.")
    dtype = DTYPES[code - 1] if 0 < code <= len(DTYPES) else ""
    return Header(Kind(kind), length, digest, seq, dtype)


def scan(
    read: Callable[[int, int], bytes], pack: str, start: int, size: int
) -> Iterator[tuple[Place, Header]]:
    """The records of a pack from byte `start` on, headers only.

    A damaged header costs its own record: the scan goes on at the next 64 bytes that are a
    header of this pack and place. A record that reaches past `size` is a torn tail, and skipped.

    Args:
        read: (offset, length) to bytes; may return fewer at the end.
        pack: the pack's name.
        start: first byte, a multiple of 64.
        size: bytes in the file.

    Raises:
        TooNew: a record of a later version.
    """
    at = window_at = padded(start)
    window = b""
    reach = _HOP_BYTES
    while at + ALIGNMENT <= size:
        if not window_at <= at <= window_at + len(window) - ALIGNMENT:
            window_at, window = at, read(at, min(reach, size - at))
            if len(window) < ALIGNMENT:
                return
        here = at - window_at
        try:
            header = parse_header(window[here : here + ALIGNMENT], pack, at)
        except Corrupt:
            reach = _SEARCH_BYTES
            at = window_at + _next_magic(window, here + ALIGNMENT)
            continue
        reach = _HOP_BYTES
        at += ALIGNMENT
        if header.length <= size - at:
            yield Place(pack, at, header.length), header
            at += padded(header.length)


def _next_magic(window: bytes, start: int) -> int:
    """Where the next header may begin: in C, for a torn tensor may be many GiB long."""
    found = window.find(_MAGIC, start)
    while found % ALIGNMENT and found >= 0:
        found = window.find(_MAGIC, padded(found))
    return found if found >= 0 else padded(len(window) - len(_MAGIC) + 1)


# ---------------------------------------------------------------------------------- payloads


@dataclass(frozen=True)
class Model:
    """A manifest with what the store knows beside it.

    Attributes:
        manifest: names the tensors; its ref is the model's.
        owners: tensor to the ancestor that first wrote it; left out where it is this model.
        tied: name to the name it shares memory with.
        signature: JSON of lineage.Signature, or None.
        score: higher is better; breaks ties of `nearest`.
        time_s: seconds since the epoch when it was put.
    """

    manifest: Manifest
    owners: Mapping[str, Ref] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    signature: Any = None
    score: float | None = None
    time_s: float = 0.0

    def to_bytes(self) -> bytes:
        """Two lines of JSON: the canonical manifest, whose digest is the ref, and the rest."""
        rest = {
            "owners": self.owners,
            "score": self.score,
            "signature": self.signature,
            "tied": self.tied,
            "time_s": self.time_s,
        }
        line = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        return f"{self.manifest.to_json()}\n{line}".encode()

    @classmethod
    def from_bytes(cls, payload: bytes, pack: str = "") -> "Model":
        """The inverse of to_bytes.

        Raises:
            Corrupt: it is no such thing.
        """
        try:
            first, second = payload.decode().split("\n")
            body, rest = json.loads(first), json.loads(second)
            tensors = {
                name: TensorInfo(dtype, tuple(shape), digest)
                for name, (dtype, shape, digest) in body["tensors"].items()
            }
            manifest = Manifest(tensors, body["meta"], tuple(map(Ref, body["parents"])))
            _check_manifest(manifest)
            model = cls(manifest, **{key: rest[key] for key in _REST})
            _check_rest(model)
        except _MALFORMED as error:
            raise Corrupt(
                f"a model's record in {pack or 'a pack'} is malformed: {error!r}."
            ) from error
        if manifest.to_json() != first:
            raise Corrupt(f"the manifest of {manifest.ref[:12]} in {pack} is not canonical.")
        return model


_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
DEEPEST = 100
"""Levels of metadata. Without it what can be read depends on the Python and on who calls."""

_NESTING = (Mapping, list, tuple)
_REST = ("owners", "score", "signature", "tied", "time_s")


def check_nesting(meta: Mapping[str, Any]) -> None:
    """Raise ValueError if metadata is nested more than DEEPEST levels deep."""
    level: list[Any] = [meta]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _inside(value: Any) -> Iterator[Any]:  # noqa: ANN401 - any JSON
    inner = value.values() if isinstance(value, Mapping) else value
    return (one for one in inner if isinstance(one, _NESTING))


def _check_manifest(manifest: Manifest) -> None:
    for name, info in manifest.tensors.items():
        sizes = all(type(n) is int and n >= 0 for n in info.shape)
        fits = sizes and math.prod(max(n, 1) for n in info.shape) < 2**63  # torch's own limit
        if info.dtype not in DTYPES or not fits or len(bytes.fromhex(info.digest)) != 32:
            raise ValueError(f"tensor {name!r} is {info}")
    if not isinstance(manifest.meta, Mapping):
        raise ValueError("meta is no object")
    check_nesting(manifest.meta)
    for parent in manifest.parents:
        if len(bytes.fromhex(parent)) != 32:
            raise ValueError(f"parent {parent!r}")


def _check_rest(model: Model) -> None:
    tensors = model.manifest.tensors
    for name, owner in model.owners.items():
        if name not in tensors or len(bytes.fromhex(owner)) != 32:
            raise ValueError(f"owner {owner!r} of {name!r}")
    for name, first in model.tied.items():
        if tensors[name] != tensors[first]:
            raise ValueError(f"{name!r} is tied to {first!r}")
    if not isinstance(model.time_s, int | float) or not isinstance(model.score, int | float | None):
        raise ValueError(f"score {model.score!r} at {model.time_s!r}")
    float(model.time_s), float(model.score or 0.0)


def tag_bytes(name: str, ref: Ref | None) -> bytes:
    """Payload of a TAG record; no ref: the tag is gone."""
    return json.dumps({"ref": ref, "tag": name}, sort_keys=True).encode()


def retired_bytes(ref: Ref, parents: tuple[Ref, ...]) -> bytes:
    """Payload of a RETIRED record; the parents keep the lineage of its children whole."""
    return json.dumps({"parents": parents, "ref": ref}, sort_keys=True).encode()


def parse_tag(payload: bytes, pack: str) -> tuple[str, Ref | None]:
    """Name and ref of a TAG record.

    Raises:
        Corrupt: it is no such thing.
    """
    try:
        body = json.loads(payload)
        name, ref = body["tag"], body["ref"]
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"tag {name!r}")
        return name, None if ref is None else _checked_ref(ref)
    except _MALFORMED as error:
        raise Corrupt(f"a tag's record in {pack} is malformed: {error!r}.") from error


def parse_retired(payload: bytes, pack: str) -> tuple[Ref, tuple[Ref, ...]]:
    """Ref and parents of a RETIRED record.

    Raises:
        Corrupt: it is no such thing.
    """
    try:
        body = json.loads(payload)
        return _checked_ref(body["ref"]), tuple(map(_checked_ref, body["parents"]))
    except _MALFORMED as error:
        raise Corrupt(f"a retirement's record in {pack} is malformed: {error!r}.") from error


def _checked_ref(ref: str) -> Ref:
    if len(bytes.fromhex(ref)) != 32:
        raise ValueError(f"ref {ref!r}")
    return Ref(ref)
