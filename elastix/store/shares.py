"""A model put by several writers: each writes a share of the tensors, then one commits them all.

Not here: who writes what, and what happens when a writer dies (train.checkpoint.assembly).

Invariant: as for `put`. A share is durable before it is handed over, and no model is visible
before every tensor that it names is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastix.errors import StoreError
from elastix.state import Ref, TensorInfo
from elastix.store.records import Place


@dataclass(frozen=True)
class Share:
    """Tensors that are durable in packs, and that no model refers to yet.

    Attributes:
        infos: what the model's manifest will say of them.
        tied: name to the name it shares memory with.
        places: where those stand that had to be written, by digest; the store had the others.
    """

    infos: Mapping[str, TensorInfo] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[bytes, Place] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all its tensors; those that share memory count once."""
        return sum(info.nbytes for name, info in self.infos.items() if name not in self.tied)

    @property
    def written_bytes(self) -> int:
        """Payload bytes that were new to the store."""
        return sum(place.length for place in self.places.values())


class Vanished(StoreError):
    """Tensors of a share are gone: gc came between writing and committing. Write them again.

    Attributes:
        names: the tensors.
    """

    def __init__(self, ref: Ref, names: Sequence[str]) -> None:
        super().__init__(
            f"model {ref[:12]} was not stored: gc removed {len(names)} of its tensors before it "
            f"was committed, {names[0] if names else ''!r} among them. Write them again."
        )
        self.names = tuple(names)


def joined(shares: Sequence[Share]) -> Share:
    """Several shares as one; of a tensor written twice the later counts."""
    infos: dict[str, TensorInfo] = {}
    tied: dict[str, str] = {}
    places: dict[bytes, Place] = {}
    for share in shares:
        infos.update(share.infos)
        tied.update(share.tied)
        places.update(share.places)
    # What one share has tied, a later one may have by itself, and otherwise.
    tied = {name: first for name, first in tied.items() if infos[name] == infos[first]}
    return Share(infos, tied, places)
