"""Who derives from whom, and what two models share. Pure: no files, no torch, no clock.

Not here: how a signature is taken from a module (signatures.py), or how the best of a hundred
thousand models is found quickly (nearest.py); `shared` is the definition that nearest.py answers.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blake3 import blake3

from elastix.arguments import of_kind
from elastix.errors import ConfigError, Corrupt
from elastix.state import Manifest, Ref
from elastix.store.whole_tensors import wholes

Mode = Literal["lp", "lcs"]
Parents = Callable[[Ref], Sequence[Ref]]

_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: it is half of json.dumps

# ----------------------------------------------------------------------------------- derivation


def ancestors(ref: Ref, parents: Parents) -> list[Ref]:
    """Every model that `ref` derives from, nearest first; `ref` itself is not among them."""
    return list(_reach(ref, parents))[1:]


def _reach(ref: Ref, parents: Parents) -> dict[Ref, None]:
    found: dict[Ref, None] = {ref: None}
    level = [ref]
    while level:
        level = [p for node in level for p in parents(node)]
        level = [p for p in dict.fromkeys(level) if p not in found]
        found.update(dict.fromkeys(level))
    return found


def common_ancestor(a: Ref, b: Ref, parents: Parents) -> Ref | None:
    """The nearest model that both are or derive from, or None.

    Nearest: the fewest edges to `a` and `b` together, then the lowest ref.
    Source: git merge-base answers the same question for commits.
    """
    far_a, far_b = _distances(a, parents), _distances(b, parents)
    both = far_a.keys() & far_b.keys()
    return min(both, key=lambda ref: (far_a[ref] + far_b[ref], ref), default=None)


def _distances(ref: Ref, parents: Parents) -> dict[Ref, int]:
    distance = {ref: 0}
    level = [ref]
    while level:
        below = [(p, distance[node] + 1) for node in level for p in parents(node)]
        level = []
        for node, steps in below:
            if node not in distance:
                distance[node] = steps
                level.append(node)
    return distance


def inherited(
    manifest: Manifest, parents: Mapping[Ref, tuple[Manifest, Mapping[str, Ref]] | None]
) -> dict[str, Ref]:
    """Owner of every tensor of `manifest` that a parent has under the same name, bit for bit.

    Args:
        manifest: the child.
        parents: each parent's manifest with its own owners, None for one that is not here; the
            first that has a tensor counts.
    """
    owners: dict[str, Ref] = {}
    for ref, found in parents.items():
        if found is None:
            continue
        parent, known = found
        for name, info in manifest.tensors.items():
            if name not in owners and parent.tensors.get(name) == info:
                owners[name] = known.get(name, ref)
    return owners


@dataclass(frozen=True)
class Diff:
    """From model `a` to model `b`: names of tensors, and metadata as (in a, in b).

    A tensor that is kept in parts has its own name here, and is the same as one that is kept whole
    or in other parts if the elements are.

    Attributes:
        added: only in b. removed: only in a. changed: in both, different.
        same: in both, bit for bit.
        meta: metadata and metrics that differ; None stands for an absent one.
    """

    a: Ref
    b: Ref
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    same: tuple[str, ...]
    meta: Mapping[str, tuple[Any, Any]]


def diff(a: Manifest, b: Manifest, equal: Callable[[str], bool]) -> Diff:
    """What differs from `a` to `b`.

    Args:
        a: the one.
        b: the other.
        equal: looks at the elements of a tensor that they keep in different parts.

    Raises:
        Corrupt: the parts of a tensor contradict each other.
    """
    ours, theirs = wholes(a), wholes(b)
    both = ours.keys() & theirs.keys()
    same = set()
    for name in both:
        one, other = ours[name], theirs[name]
        if one.stored == other.stored:
            alike = all(a.tensors[key] == b.tensors[key] for key in one.stored)
        else:
            alike = (one.dtype, one.shape) == (other.dtype, other.shape) and equal(name)
        if alike:
            same.add(name)
    keys = sorted({*a.meta, *b.meta})
    return Diff(
        a=a.ref,
        b=b.ref,
        added=tuple(sorted(theirs.keys() - both)),
        removed=tuple(sorted(ours.keys() - both)),
        changed=tuple(sorted(both - same)),
        same=tuple(sorted(same)),
        meta={k: (a.meta.get(k), b.meta.get(k)) for k in keys if a.meta.get(k) != b.meta.get(k)},
    )


# ----------------------------------------------------------------------------------- signatures


@dataclass(frozen=True)
class Layer:
    """A part of a model that holds tensors.

    Attributes:
        name: its place in the model, the prefix of its tensors' names.
        kind: type and configuration, such as `Conv2d(3, 16, kernel_size=(3, 3))`.
        tensors: own name and shape of each tensor, in the order of the state dict.
        path: Merkle id, 64 bits: the layer and all that its input went through.
    """

    name: str
    kind: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    path: int

    @property
    def id(self) -> int:
        """64 bits: kind and shapes, whatever comes before."""
        return digest64(self.kind, self.tensors)


@dataclass(frozen=True)
class Signature:
    """The layers of a model in the order in which they run. Tensors' values play no part."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        # Both are asked for in every query: 64-bit ids, equal ones told apart by their count.
        object.__setattr__(self, "ids", tuple(layer.id for layer in self.layers))
        object.__setattr__(self, "paths", tuple(_counted([la.path for la in self.layers])))

    ids: tuple[int, ...] = ()
    paths: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """Plain values; `from_json` is the inverse."""
        return [
            [la.name, la.kind, [[n, list(s)] for n, s in la.tensors], f"{la.path:016x}"]
            for la in self.layers
        ]

    @classmethod
    def from_json(cls, values: Any) -> "Signature":  # noqa: ANN401 - straight from json.loads
        """The inverse of to_json.

        Raises:
            Corrupt: it is no signature.
        """
        try:
            return cls(
                tuple(
                    Layer(
                        str(name),
                        str(kind),
                        tuple((str(n), tuple(map(int, s))) for n, s in tensors),
                        int(path, 16) % 2**64,
                    )
                    for name, kind, tensors, path in values
                )
            )
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise Corrupt(f"a stored signature is malformed: {error!r}.") from error


def as_stored(signature: Signature | None) -> list[Any] | None:
    """What the record of a model has of it.

    Raises:
        ConfigError: it is none.
    """
    return None if signature is None else of_kind("signature", signature, Signature).to_json()


def digest64(*parts: Any) -> int:  # noqa: ANN401 - whatever JSON takes
    """A 64-bit id of JSON values."""
    return int.from_bytes(blake3(_encode(parts).encode()).digest(8), "little")


def _counted(paths: Sequence[int]) -> Iterator[int]:
    """The second, third.. of equal ids become other ids, so that sets count like multisets."""
    seen: Counter[int] = Counter()
    for path in paths:
        yield digest64(path, seen[path]) if seen[path] else path
        seen[path] += 1


def shared(a: Signature, b: Signature, mode: Mode) -> list[tuple[Layer, Layer]]:
    """The layers of `a` with the layers of `b` that they may inherit from, in order.

    lp: the longest common prefix; on a graph, every layer whose whole upstream is the same.
    lcs: a longest common subsequence of the layers, whatever comes before them.

    Source: LP and LCS of Liu et al., CLUSTER'21; the graph prefix of EvoStore, HPDC'24.

    Raises:
        ConfigError: no such mode.
    """
    if mode == "lp":
        there = dict(zip(b.paths, b.layers, strict=True))
        return [
            (layer, there[path])
            for layer, path in zip(a.layers, a.paths, strict=True)
            if path in there
        ]
    if mode != "lcs":
        raise ConfigError(f"mode must be 'lp' or 'lcs', not {mode!r}.")
    rows, columns = len(a.ids), len(b.ids)
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            best[i][j] = (
                best[i + 1][j + 1] + 1
                if a.ids[i] == b.ids[j]
                else max(best[i + 1][j], best[i][j + 1])
            )
    pairs = []
    i = j = 0
    while i < rows and j < columns:
        if a.ids[i] == b.ids[j]:
            pairs.append((a.layers[i], b.layers[j]))
            i, j = i + 1, j + 1
        elif best[i + 1][j] >= best[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
