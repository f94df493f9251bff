"""Git for tensors: models by content, with their lineage. See docs/store-format.md."""

from typing import TYPE_CHECKING, Any

from elastix.store.gc import Collected
from elastix.store.lineage import Diff, Layer, Signature, shared
from elastix.store.log import Entry
from elastix.store.shares import Share, Vanished
from elastix.store.soup import Soup
from elastix.store.store import Match, Store
from elastix.store.verify import Damage, Stats

if TYPE_CHECKING:
    from elastix.store.server import StoreServer
    from elastix.store.signatures import signature

__all__ = [
    "Collected",
    "Damage",
    "Diff",
    "Entry",
    "Layer",
    "Match",
    "Share",
    "Signature",
    "Soup",
    "Stats",
    "Store",
    "StoreServer",
    "Vanished",
    "shared",
    "signature",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name is
    """What a Store alone does without is imported when it is first asked for: Ray, torch.fx."""
    if name == "signature":
        from elastix.store.signatures import signature

        return signature
    if name == "StoreServer":
        from elastix.store.server import StoreServer

        return StoreServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
