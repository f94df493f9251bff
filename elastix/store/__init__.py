"""Git for tensors: models by content, with their lineage. See docs/store-format.md."""

from elastix.store.gc import Collected
from elastix.store.lineage import Diff, Layer, Signature, shared
from elastix.store.signatures import signature
from elastix.store.store import Entry, Match, Store
from elastix.store.verify import Damage, Stats

__all__ = [
    "Collected",
    "Damage",
    "Diff",
    "Entry",
    "Layer",
    "Match",
    "Signature",
    "Stats",
    "Store",
    "shared",
    "signature",
]
