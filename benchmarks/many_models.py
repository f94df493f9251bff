"""What a store of very many models costs those who use it. A part of benchmarks.size.

One store grows from size to size. Its models are small chains of 4 to 8 layers. Each is a mutation
of one of the latest 10,000: it has the tensors of its parent but for the layer that was changed
and the last one. A thousand models in a row are of one campaign. They are written to packs as
`put` writes them, and not to the index. At each size, in processes of their own:

- `adopt_us`: entering the models that the index does not know yet, each of them; what making the
  index anew costs as well.
- `open_s`: opening it. `first_nearest_s`: the first question, for which all signatures are read.
- `lp_us`, `lcs_us`: nearest by prefix and by common subsequence; `lp_p99_us`: of a hundred the
  slowest. `campaign_us`: by prefix among those of one campaign.
- `put_us`: putting a child of a stored model. `put_nearest_us`: the question after it.
- `get_us`: reading a model. `log_us`: the latest ten.
- `retire_us`: retiring a model; a hundredth of them is, in a row.
- `gc_s`: garbage collection then, and `gc_again_s`: another one, which finds nothing to do.
- `bytes_per_model`, `index_bytes_per_model`: on the disk.
- `nearest_bytes_per_model`, `peak_mib`: memory that the first questions added, and the most that
  each of the processes held.

Times are CPU seconds of the process, medians; waiting for a disk is in none.
"""

import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from benchmarks.processes import apart, resident
from benchmarks.store_trace import KINDS
from elastix.state import Manifest, Ref, State, TensorInfo
from elastix.store import Signature, Store
from elastix.store.lineage import Layer, digest64
from elastix.store.local_packs import LocalPacks
from elastix.store.packs import SEAL_AT_BYTES
from elastix.store.records import Header, Kind, Model

SIZES = (10_000, 100_000, 1_000_000)
FEWEST, MOST = 4, 8
WIDTH = 16  # numbers in a tensor
LATEST = 10_000
CAMPAIGN = 1_000
RETIRED_SHARE = 100
_WEIGHT = (("weight", (WIDTH,)),)


@dataclass(frozen=True)
class _Made:
    """A model that others may descend from: its layers, its tensors and whose they are."""

    ref: Ref
    kinds: tuple[int, ...]
    digests: tuple[str, ...]
    owners: dict[str, Ref]


class Family:
    """Makes models, and writes each as a store does.

    Attributes:
        refs: of all models, in the order in which they were made.
        latest: those that the next ones may descend from.
    """

    def __init__(self, seed: int = 0) -> None:
        self.refs: list[bytes] = []
        self.latest: deque[_Made] = deque(maxlen=LATEST)
        self._choose = random.Random(seed)
        self._layers: dict[tuple[int, ...], Layer] = {}

    def grow(self, root: Path, size: int) -> None:
        """Write models to packs until there are so many."""
        writer = LocalPacks(root).writer()
        while len(self.refs) < size:
            manifest, signature, owners, payloads = self.child()
            for digest, payload in payloads:
                header = Header(Kind.TENSOR, len(payload), bytes.fromhex(digest), dtype="float32")
                writer.append(header, payload)
            model = Model(
                manifest,
                owners,
                signature=signature.to_json(),
                score=self._choose.random(),
                time_s=1.7e9 + len(self.refs),
            )
            body = model.to_bytes()
            seq = len(self.refs)
            writer.append(Header(Kind.MODEL, len(body), blake3(body).digest(), seq=seq), body)
            if writer.size >= SEAL_AT_BYTES:
                writer.seal()
        writer.close()

    def child(self) -> tuple[Manifest, Signature, dict[str, Ref], list[tuple[str, bytes]]]:
        """The next model: manifest, signature, owners of what it inherits, and its new tensors."""
        choose = self._choose
        parent = None
        if len(self.latest) >= 200:
            parent = self.latest[choose.randrange(len(self.latest))]
        if parent is None:
            count = choose.randint(FEWEST, MOST)
            kinds = tuple(choose.randrange(len(KINDS)) for _ in range(count))
            digests: list[str] = [""] * count
        else:
            kinds, digests = self._mutated(parent)
        payloads = []
        for place, digest in enumerate(digests):
            if not digest:
                payload = choose.randbytes(4 * WIDTH)
                digests[place] = blake3(payload).hexdigest()
                payloads.append((digests[place], payload))
        tensors = {
            f"layers.{place}.weight": TensorInfo("float32", (WIDTH,), digest)
            for place, digest in enumerate(digests)
        }
        number = len(self.refs)
        meta = {"campaign": f"c{number // CAMPAIGN}", "number": number}
        manifest = Manifest(tensors, meta, (parent.ref,) if parent else ())
        owners = _owners(parent, digests)
        ref = manifest.ref
        self.refs.append(bytes.fromhex(ref))
        self.latest.append(_Made(ref, kinds, tuple(digests), owners))
        return manifest, self.signature(kinds), owners, payloads

    def forget(self, retired: Iterable[str]) -> None:
        """These have no further children: their tensors may be gone."""
        gone = set(retired)
        alive = [made for made in self.latest if made.ref not in gone]
        self.latest = deque(alive, maxlen=LATEST)

    def _mutated(self, parent: _Made) -> tuple[tuple[int, ...], list[str]]:
        """One layer replaced, inserted or removed; it and the last one have new tensors."""
        choose = self._choose
        kinds, digests = list(parent.kinds), list(parent.digests)
        place, action = choose.randrange(len(kinds)), choose.randrange(3)
        kind = choose.randrange(len(KINDS))
        if action == 0 and len(kinds) < MOST:
            kinds.insert(place, kind)
            digests.insert(place, "")
        elif action == 1 and len(kinds) > FEWEST:
            del kinds[place], digests[place]
        else:
            kinds[place], digests[place] = kind, ""
        digests[-1] = ""
        return tuple(kinds), digests

    def signature(self, kinds: Sequence[int]) -> Signature:
        """Of a chain of such layers."""
        return Signature(tuple(self._layer(tuple(kinds[: n + 1])) for n in range(len(kinds))))

    def _layer(self, kinds: tuple[int, ...]) -> Layer:
        """The last layer of a chain."""
        found = self._layers.get(kinds)
        if found is None:
            before = [self._layer(kinds[:-1]).path] if len(kinds) > 1 else []
            kind = KINDS[kinds[-1]]
            path = digest64(kind, _WEIGHT, before)
            if len(self._layers) > LATEST:
                self._layers.clear()
            found = self._layers[kinds] = Layer(f"layers.{len(kinds) - 1}", kind, _WEIGHT, path)
        return found


def _owners(parent: _Made | None, digests: Sequence[str]) -> dict[str, Ref]:
    """As Store.put has them: an equal tensor of the same name is the parent's."""
    if parent is None:
        return {}
    owners = {}
    for place, (mine, theirs) in enumerate(zip(digests, parent.digests, strict=False)):
        if mine == theirs:
            name = f"layers.{place}.weight"
            owners[name] = parent.owners.get(name, parent.ref)
    return owners


# ------------------------------------------------------------------ what is asked


def _adopt(root: Path, models: int) -> dict[str, float]:
    """Enter `models` models that the index does not know."""
    begun = time.process_time()
    Store(root).close()
    return {"adopt_us": 1e6 * (time.process_time() - begun) / models}


def _use(root: Path, questions: int, seed: int, latest: Sequence[_Made]) -> dict[str, float]:
    """Open it, ask, put."""
    family = Family(seed)
    chosen = random.Random(seed).choices(latest, k=questions)
    queries = [family.signature(family._mutated(one)[0]) for one in chosen]
    begun = time.process_time()
    store = Store(root)
    found = {"open_s": time.process_time() - begun}
    before = resident()
    begun = time.process_time()
    store.nearest(queries[0])
    found["first_nearest_s"] = time.process_time() - begun
    store.nearest(queries[0], "lcs")
    models = store.stats().models
    found["nearest_bytes_per_model"] = (resident() - before) / models
    with store:
        lp = list(_times(store.nearest, queries))
        found["lp_us"], found["lp_p99_us"] = statistics.median(lp), _percentile(lp, 0.99)
        few = queries[: max(1, questions // 20)]
        found["lcs_us"] = _median(lambda query: store.nearest(query, "lcs"), few)
        found["campaign_us"] = _median(
            lambda query: store.nearest(query, where={"campaign": "c3"}), few
        )
        found["get_us"] = _median(lambda one: store.get(one.ref).tensors["layers.0.weight"], chosen)
        found["log_us"] = _median(lambda _: store.log(limit=10), few)
        asked: list[float] = []
        puts: list[float] = []
        for one, query in zip(chosen, queries, strict=True):
            state = State(
                {f"layers.{n}.weight": torch.rand(WIDTH) for n in range(len(query.layers))},
                {"campaign": "put"},
                (one.ref,),
            )
            puts += _times(partial(store.put, signature=query, score=0.5), [state])
            asked += _times(store.nearest, [query])
    found["put_us"], found["put_nearest_us"] = statistics.median(puts), statistics.median(asked)
    return found


def _collect(root: Path, refs: Sequence[str]) -> dict[str, float]:
    """Retire these models, and collect."""
    with Store(root) as store:
        found = {"retire_us": _median(store.retire, refs)}
        for name in ("gc_s", "gc_again_s"):
            begun = time.process_time()
            store.gc()
            found[name] = time.process_time() - begun
    return found


def _times(ask: Callable[[Any], object], queries: Sequence[Any]) -> Iterator[float]:
    """CPU microseconds of each question."""
    for query in queries:
        begun = time.process_time()
        ask(query)
        yield 1e6 * (time.process_time() - begun)


def _median(ask: Callable[[Any], object], queries: Sequence[Any]) -> float:
    return statistics.median(_times(ask, queries))


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def store_of(
    sizes: Sequence[int], folder: Path | None = None, questions: int = 400
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each size, and what a store of so many models costs.

    Args:
        sizes: ascending.
        folder: where to work; a temporary folder by default.
        questions: of the frequent ones, how often each is asked.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root = Path(place) / "store"
        family = Family()
        for size in sizes:
            new = size - len(family.refs)
            begun = time.process_time()
            family.grow(root, size)
            made_s = time.process_time() - begun
            found: dict[str, Any] = {"models": size}
            peaks = {}
            middle, some = size // 2, size // RETIRED_SHARE
            retired = [ref.hex() for ref in family.refs[middle : middle + some]]
            latest = list(family.latest)
            for name, ask, arguments in (
                ("adopt", _adopt, (root, new)),
                ("use", _use, (root, questions, size, latest)),
                ("collect", _collect, (root, retired)),
            ):
                figures, peaks[name] = apart(ask, *arguments)
                found |= figures
                if name == "adopt":
                    found["bytes_per_model"] = _bytes(root, "*.pack") / size
                    found["index_bytes_per_model"] = _bytes(root, "index.sqlite*") / size
            family.forget(retired)
            found = {name: _rounded(value) for name, value in found.items()}
            found["peak_mib"] = {name: round(peak, 1) for name, peak in peaks.items()}
            found["made_s"] = round(made_s, 1)
            yield size, found


def _bytes(root: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in root.rglob(pattern))


def _rounded(value: float) -> float:
    return round(value, 4 if abs(value) < 1 else 1)
