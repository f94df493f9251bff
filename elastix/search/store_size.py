"""How large a campaign's store grows, told now and then."""

import logging
import time
from collections.abc import Callable

from elastix.errors import StoreError
from elastix.events import Event, StoreMeasured, TrialEnded
from elastix.store import Store

_EVERY_S = 5.0
_SHARE = 0.01
"""Of the time, at most, goes into asking: it takes longer the more there is."""

_log = logging.getLogger(__name__)


class StoreSize:
    """Asks the store after a trial, if it is time.

    Args:
        store: opened for this alone; read-only is enough.
        emit: is given a StoreMeasured.
    """

    def __init__(self, store: Store, emit: Callable[[Event], None]) -> None:
        self._store = store
        self._emit = emit
        self._due = time.monotonic()

    def read(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, TrialEnded) and time.monotonic() >= self._due:
            self.measure()

    def measure(self) -> None:
        """Ask now. A store that does not answer is left alone: the trials matter more."""
        began = time.monotonic()
        try:
            found = self._store.stats()
        except StoreError as error:
            _log.warning("store not measured error=%s", error)
            return
        finally:
            now = time.monotonic()
            self._due = now + max(_EVERY_S, (now - began) / _SHARE)
        self._emit(
            StoreMeasured(
                logical_bytes=found.logical_bytes,
                unique_bytes=found.unique_bytes,
                physical_bytes=found.physical_bytes,
            )
        )
