"""Tensors of a manifest as readers see them: whole, whatever parts they are kept in. Pure.

Not here: what a part's name looks like, and which parts are one tensor (sharding).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elastix.errors import Corrupt, StateError
from elastix.sharding import Part, Shape, tensors_of, whole_of
from elastix.state import Manifest, Ref, TensorInfo


@dataclass(frozen=True)
class Whole:
    """One tensor.

    Attributes:
        stored: the names that it is kept under, each with its part; one without a part, if whole.
    """

    dtype: str
    shape: Shape
    stored: Mapping[str, Part | None]

    @property
    def split(self) -> bool:
        """It is kept in parts."""
        return None not in self.stored.values()


def wholes(manifest: Manifest) -> dict[str, Whole]:
    """The tensors of a model by name.

    Raises:
        Corrupt: the parts of one contradict each other; names model and tensor.
    """
    return {
        name: checked(manifest.ref, name, stored, manifest.tensors)
        for name, stored in tensors_of(manifest.tensors).items()
    }


def checked(
    ref: Ref, name: str, stored: Mapping[str, Part | None], infos: Mapping[str, TensorInfo]
) -> Whole:
    """One tensor of the model `ref`; the rest as for sharding.whole_of.

    Raises:
        Corrupt: its parts contradict each other.
    """
    try:
        dtype, shape = whole_of(name, stored, infos)
    except StateError as error:
        raise Corrupt(
            f"tensor {name!r} of model {ref[:12]} cannot be read: {error} Nothing was changed; "
            "other tensors and models are readable."
        ) from error
    return Whole(dtype, shape, stored)
