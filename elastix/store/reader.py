"""Models and tensors out of packs: zero copy, each tensor's digest compared once in a process.

A tensor that is kept in parts is put together when it is asked for, in memory of its own; of its
parts those are read that overlap what is wanted.

Not here: tensors into bytes (tensors.py), and where things stand (the ledger knows).

Invariants: bytes, dtype, shape and ties come back as they were; what one `read` hands out shares
no memory that is written to with another's, nor two tensors of it that were not tied; nothing is
handed out whose digest was not compared.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from blake3 import blake3

from elastix.errors import Corrupt, NotFound, StoreError
from elastix.lazy_import import later
from elastix.sharding import Part, Shape, named_part
from elastix.state import Ref, State, TensorInfo
from elastix.store.index import Row
from elastix.store.ledger import Ledger
from elastix.store.packs import Packs, View, read_record
from elastix.store.records import ALIGNMENT, Kind, Model, Place, parse_header
from elastix.store.whole_tensors import checked

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

_ATTEMPTS = 16
_MODELS_KEPT = 256
_PLANS_KEPT = 1024
_PAYLOADS_KEPT = 1 << 16  # of one that is forgotten the digest is checked once more
_ARRAY_DIMS = 64  # numpy has no more


class Moved(StoreError):
    """A pack was removed between the index's answer and its opening: ask again."""


@dataclass(slots=True)
class _Payload:
    """A tensor's bytes in a pack, and whether they were compared with their digest."""

    place: Place
    digest: str
    checked: bool = False


class _Wanted(NamedTuple):
    """One tensor of a model: what it is made of.

    Attributes:
        first: the name it shares memory with, or its own.
        array: numpy's name for its dtype, if it has one.
        alone: no other tensor of the plan has these bytes, unless it is tied to this one.
    """

    name: str
    first: str
    dtype: torch.dtype
    array: np.dtype[Any] | None
    shape: tuple[int, ...]
    nbytes: int
    payload: _Payload
    alone: bool


class _Split(NamedTuple):
    """One tensor of a model that is kept in parts.

    Attributes:
        first: what all its parts share memory with, and where in that they are: equal for two
            names of one tensor.
    """

    dtype: torch.dtype
    shape: Shape
    parts: tuple[tuple[Part, _Wanted], ...]

    @property
    def first(self) -> frozenset[tuple[Part, str]]:
        return frozenset((part, wanted.first) for part, wanted in self.parts)


class ReadPlan(NamedTuple):
    """Which tensors of a model are wanted.

    Attributes:
        whole: by name, those that are kept whole.
        split: by name, those that are kept in parts.
        packs: those that they stand in, each with the name of a tensor in it.
    """

    whole: Mapping[str, _Wanted]
    split: Mapping[str, _Split]
    packs: Mapping[str, str]


class Reader:
    """Finds models and builds their tensors; remembers what never changes."""

    def __init__(self, packs: Packs, ledger: Ledger) -> None:
        self._packs = packs
        self._ledger = ledger
        # By digest too: an index that is damaged may name one place for two of them.
        self._payloads: OrderedDict[tuple[Place, str], _Payload] = OrderedDict()
        # Lately read. Equal States have one ref, and another record if one was stored anew or by
        # somebody else: with another score, signature or ties.
        self._models: dict[Ref, tuple[Place, Model]] = {}
        self._plans: dict[tuple[Place, tuple[str, ...]], ReadPlan] = {}  # by the model's record

    def keep(self, ref: Ref, place: Place, model: Model) -> None:
        """Remember a model and where its record is, for a while."""
        if len(self._models) >= _MODELS_KEPT:
            self._models.clear()
        self._models[ref] = place, model

    def model(self, name: str) -> tuple[Row, Model]:
        """The model that a tag, a ref or the beginning of one means.

        Raises:
            NotFound: no such model, or it was retired. Corrupt: its record is damaged.
        """
        for attempt in range(_ATTEMPTS):
            row = self._ledger.find(name)
            kept = self._models.get(row.ref)
            if kept is not None and kept[0] == row.place:
                return row, kept[1]
            try:
                _, payload = read_record(self._packs, row.place, Kind.MODEL)
                model = Model.from_bytes(payload, row.place.pack)
            except NotFound as error:
                if attempt + 1 == _ATTEMPTS:
                    raise Corrupt(
                        f"the manifest of model {row.ref[:12]} cannot be read: {error} Nothing was "
                        "changed. `elastix store verify` lists all that is damaged."
                    ) from error
                self._ledger.refresh()  # a copy of the index does not know where gc has moved it
                continue
            except Corrupt as error:
                self._ledger.doubt(bytes.fromhex(row.ref))
                raise Corrupt(
                    f"the manifest of model {row.ref[:12]} cannot be read: {error} Nothing was "
                    "changed; other models are readable."
                ) from error
            if model.manifest.ref != row.ref:
                raise Corrupt(f"the record of model {row.ref[:12]} is that of another one.")
            self.keep(row.ref, row.place, model)
            return row, model
        raise NotFound(f"model {name!r} could not be read.")  # pragma: no cover

    def read(self, name: str, patterns: tuple[str, ...], lazy: bool) -> State:
        """The tensors of a model whose names match; see Store.get."""
        for attempt in range(_ATTEMPTS):
            row, model = self.model(name)
            try:
                plan = self._plan(row, model, patterns)
                tensors = Tensors(row.ref, plan, self._packs, self._doubt)
                found: Mapping[str, torch.Tensor] = tensors if lazy else tensors.all()
            except (Moved, NotFound) as moved:  # NotFound: far away nothing keeps a pack in place
                self._plans.pop((row.place, patterns), None)
                if attempt + 1 == _ATTEMPTS:
                    raise Corrupt(str(moved)) from moved
                self._ledger.refresh()
                continue
            manifest = model.manifest
            return State(found, manifest.meta, manifest.parents)
        raise NotFound(f"model {name!r} could not be read.")  # pragma: no cover

    def _doubt(self, digest: str) -> None:
        """A tensor is not as it was written: ask where it stands, for it may be put again."""
        self._plans.clear()
        self._ledger.doubt(bytes.fromhex(digest))

    def _plan(self, row: Row, model: Model, patterns: tuple[str, ...]) -> ReadPlan:
        """Where the wanted tensors stand: one question to the index.

        Remembered for as long as its packs can be opened: a pack's bytes never change.
        """
        ref = row.ref
        plan = self._plans.get((row.place, patterns))
        if plan is not None:
            return plan
        wanted: dict[str, TensorInfo] = {}
        in_parts: dict[str, dict[str, Part | None]] = {}
        for name, info in model.manifest.tensors.items():
            found = named_part(name)
            if _pattern(patterns).match(name if found is None else found[0]):
                wanted[name] = info
                if found is not None:
                    in_parts.setdefault(found[0], {})[name] = found[1]
        digests = {name: bytes.fromhex(info.digest) for name, info in wanted.items()}
        places = self._ledger.places(tuple(set(digests.values())))
        first = {name: model.tied.get(name, name) for name in wanted}
        users = Counter({first[name]: digest for name, digest in digests.items()}.values())
        tensors = {}
        for name, info in wanted.items():
            digest = digests[name]
            if digest not in places:
                raise Moved(_says(ref, name, "no pack holds its bytes"))
            place = places[digest]
            payload = self._payload(place, info.digest)
            dtype = getattr(torch, info.dtype)
            nbytes = math.prod(info.shape) * dtype.itemsize
            alone = users[digest] == 1
            array = _array(info.dtype) if len(info.shape) <= _ARRAY_DIMS else None
            tensors[name] = _Wanted(
                name, first[name], dtype, array, info.shape, nbytes, payload, alone
            )
        packs = {one.payload.place.pack: name for name, one in tensors.items()}
        split = {}
        for name, parts in in_parts.items():
            if name in wanted:
                parts[name] = None
            whole = checked(ref, name, parts, wanted)
            made = tuple((part, tensors.pop(key)) for key, part in parts.items() if part)
            for _, one in made:  # before there is a tensor as large as they say
                if one.nbytes != one.payload.place.length:
                    raise Corrupt(_says(ref, name, _wrong_length(one)))
            split[name] = _Split(getattr(torch, whole.dtype), whole.shape, made)
        plan = ReadPlan(tensors, split, packs)
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[row.place, patterns] = plan
        return plan

    def _payload(self, place: Place, digest: str) -> _Payload:
        found = self._payloads.get((place, digest))
        if found is None:
            found = self._payloads.setdefault((place, digest), _Payload(place, digest))
            while len(self._payloads) > _PAYLOADS_KEPT:  # other threads are at it as well
                self._payloads.popitem(last=False)  # the first that was asked for
        return found


@lru_cache
def _array(dtype: str) -> np.dtype[Any] | None:
    try:
        found = np.dtype(dtype)
    except TypeError:  # bfloat16 and narrower
        return None
    return found if found.isbuiltin == 1 else None  # others may have registered one


@lru_cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, names)) or "(?!)")


class Tensors(Mapping[str, "torch.Tensor"]):
    """Tensors of one model, built when they are asked for. Holds a view of each pack.

    It is what sharding calls InParts: a process that needs a part of a tensor reads no more.

    The views are its own: a page of them that is written to becomes private to these tensors.
    """

    def __init__(
        self, ref: Ref, plan: ReadPlan, packs: Packs, doubt: Callable[[str], None]
    ) -> None:
        """Open every pack that is needed.

        Args:
            ref: of the model.
            plan: the tensors wanted.
            packs: where they are.
            doubt: told the digest of a tensor that is damaged.

        Raises:
            Moved: a pack is gone.
        """
        self._ref = ref
        self._plan = plan
        self._doubt = doubt
        self._views: dict[str, View] = {}
        self._made: dict[str | frozenset[tuple[Part, str]], torch.Tensor] = {}
        self._given: set[Place] = set()
        for pack, name in plan.packs.items():
            try:
                self._views[pack] = packs.view(pack)
            except NotFound as error:
                raise Moved(_says(ref, name, str(error))) from error

    def __len__(self) -> int:
        return len(self._plan.whole) + len(self._plan.split)

    def __iter__(self) -> Iterator[str]:
        yield from self._plan.whole
        yield from self._plan.split

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = self._plan.whole.get(name)
        if whole is None:
            split = self._plan.split[name]
            made = self._made.get(split.first)
            if made is None:
                made = self._made[split.first] = self._gather(split)
            return made
        made = self._made.get(whole.first)
        if made is None:
            made = self._view(whole)
            if not whole.alone:
                made = self._apart(made, whole.payload.place)
            self._made[whole.first] = made
        return made

    def tie(self, name: str) -> str | frozenset[tuple[Part, str]]:
        """Equal for names that share memory."""
        split = self._plan.split.get(name)
        return self._plan.whole[name].first if split is None else split.first

    def all(self) -> dict[str, torch.Tensor]:
        """Every tensor, built now."""
        return {name: self[name] for name in (*self._plan.whole, *self._plan.split)}

    def shape(self, name: str) -> Shape:
        """Of a whole tensor, of which nothing is read."""
        split = self._plan.split.get(name)
        return self._plan.whole[name].shape if split is None else split.shape

    def part(self, name: str, part: Part) -> torch.Tensor:
        """A part of a tensor: a view of one that is kept whole, else in memory of its own."""
        split = self._plan.split.get(name)
        if split is None:
            return self[name][part.within(_all_of(self.shape(name)))]
        return self._gather(split, part)

    def _gather(self, split: _Split, wanted: Part | None = None) -> torch.Tensor:
        """A tensor, or a part of it, from the parts that it is kept in."""
        into = wanted or _all_of(split.shape)
        made = torch.empty(into.shape, dtype=split.dtype, device="cpu")
        room = _as_bytes(made)
        for part, one in split.parts:
            both = part.overlap(into)
            if not both.empty:
                room[both.within(into)] = _as_bytes(self._view(one))[both.within(part)]
        return made

    def _apart(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """What stands for a tensor whose equal, not tied to it, must not change with it."""
        if place in self._given and place.length:
            return tensor.clone()
        self._given.add(place)
        return tensor

    def _view(self, wanted: _Wanted) -> torch.Tensor:
        payload, shape = wanted.payload, wanted.shape
        place = payload.place
        try:
            memory = self._views[place.pack].bytes_at(place.offset, place.length)
            if not payload.checked:
                self._check(payload, memory)
                payload.checked = True
            if wanted.nbytes != place.length:
                raise Corrupt(_wrong_length(wanted))
        except Corrupt as error:
            self._doubt(payload.digest)
            raise Corrupt(_says(self._ref, wanted.name, str(error))) from error
        if place.length == 0:
            return torch.empty(shape, dtype=wanted.dtype, device="cpu")
        if wanted.array is not None:  # half as long as torch takes by itself
            return torch.from_numpy(np.ndarray(shape, wanted.array, memory))
        return torch.frombuffer(memory, dtype=wanted.dtype).view(shape)

    def _check(self, payload: _Payload, memory: memoryview) -> None:
        place, at = payload.place, payload.place.offset - ALIGNMENT
        raw = bytes(self._views[place.pack].bytes_at(at, ALIGNMENT))
        header = parse_header(raw, place.pack, at)
        expected = (Kind.TENSOR, place.length, bytes.fromhex(payload.digest))
        if (header.kind, header.length, header.digest) != expected:
            raise Corrupt(f"the record at byte {place.offset} of {place.pack} is another one.")
        if blake3(memory).hexdigest() != payload.digest:
            raise Corrupt(f"the payload at byte {place.offset} of {place.pack} is damaged.")


def _all_of(shape: Shape) -> Part:
    return Part((0,) * len(shape), shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements where each is a byte, for types that torch cannot copy piece by piece."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _wrong_length(wanted: _Wanted) -> str:
    length = wanted.payload.place.length
    return f"{length} bytes are no {wanted.dtype}{list(wanted.shape)}."


def _says(ref: Ref, name: str, what: str) -> str:
    return (
        f"tensor {name!r} of model {ref[:12]} cannot be read: {what.rstrip('.')}. Nothing was "
        "changed; other tensors and models are readable."
    )
