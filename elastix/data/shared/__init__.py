"""Samples that all processes of a host decode once: no server, and nobody who must stay alive."""

from elastix.data.shared.dataset import Counts, Shared

__all__ = ["Counts", "Shared"]
