"""Every exception that elastix raises on purpose.

    ElastixError
    ├── ConfigError (ValueError)   the call is wrong; nothing was started, or the run ended
    │   ├── EmptySpace             a search space without a valid configuration
    │   └── OtherCode              a node has other elastix code than the driver
    ├── StateError                 something cannot be part of a State, or does not fit one
    ├── StoreError                 what is on disk, or should be
    │   ├── NotFound
    │   ├── Corrupt
    │   │   └── StoreDamaged       not one State: the index, or whatever else all are found by
    │   ├── TooNew                 written by a later version of elastix
    │   ├── Conflict               another process was first, or still needs it
    │   ├── Full                   no room on the disk
    │   └── ReadOnly
    ├── TrainError                 a run cannot continue
    │   ├── WorkerFailed           the train function raised: the user's own error, with its rank
    │   ├── ControllerLost         the process that leads the run died and could not be replaced
    │   ├── ReplicasDiffer         workers hold different States, or drew different batches
    │   ├── TrainingUnstable       the guard had to discard more steps than Guard.most allows
    │   ├── QuorumLost             fewer workers than the minimum, and none came in time
    │   ├── TooManyFailures        more losses than FailureConfig allows
    │   └── Interrupted            somebody else has stopped the run
    └── SearchError                a campaign cannot continue
        ├── NeverReported          the train function did not report the metric
        └── EveryTrialFailed       all trials failed: the user's own error, the first one

The class tells what kind of fault it is. A message says what happened, with the values; what
elastix did about it; and what to do next.
"""

import errno

_SHOWN, _BEGIN, _END = 3000, 2000, 500  # characters of a message


class ElastixError(Exception):
    """Base class: `except elastix.ElastixError` catches all errors of elastix and no others."""


class ConfigError(ElastixError, ValueError):
    """The call itself is wrong. Raised before any work starts, or by the train function."""

    def __init__(self, message: str = "") -> None:
        """Leave out the middle of a message that quotes a whole data set."""
        long = len(message) > _SHOWN
        super().__init__(f"{message[:_BEGIN]} [...] {message[-_END:]}" if long else message)


class EmptySpace(ConfigError):
    """No configuration of the search space is valid."""


class OtherCode(ConfigError):
    """A node has other elastix code than the driver.

    Attributes:
        node: which, by Ray's id; "" if that does not matter.
    """

    def __init__(self, message: str = "", *, node: str = "") -> None:
        """Of that node."""
        super().__init__(message)
        self.node = node


class StateError(ElastixError):
    """An object cannot be captured into a State, or a State does not fit the object."""


class StoreError(ElastixError):
    """Stored States cannot be read or written as asked."""

    @staticmethod
    def kind_of(error: OSError) -> "type[StoreError]":
        """Full if the operating system says that there is no room, else StoreError."""
        return Full if Full.tells(error) else StoreError


class NotFound(StoreError):
    """There is no stored State with that name."""


class Corrupt(StoreError):
    """A stored State is not what was written."""


class StoreDamaged(Corrupt):
    """What all stored States are found by is damaged; the States may be as they were written."""


class TooNew(StoreError):
    """The file was written by a later version of elastix."""


class Conflict(StoreError):
    """Another process changed it first, owns it, or still refers to it."""


class Full(StoreError):
    """There is no space left where the store is kept."""

    @staticmethod
    def tells(error: OSError) -> bool:
        """Whether that is what the operating system says: of the disk, or of a quota or limit."""
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ReadOnly(StoreError):
    """The store can only be read, not written."""


class TrainError(ElastixError):
    """A training run cannot continue."""


class WorkerFailed(TrainError):
    """The train function raised on one worker; the others were stopped.

    Attributes:
        rank: rank of the worker when it raised.
        worker: its id.
        traceback: the worker's own traceback, as text.
        shown: the traceback was already printed, so the error's text leaves it out.
    """

    shown = False

    def __init__(self, message: str, rank: int = -1, worker: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker
        self.traceback = traceback

    def __str__(self) -> str:
        message = super().__str__()
        if self.shown or not self.traceback:
            return message
        return f"{message} Its traceback:\n\n{self.traceback}"

    def __reduce__(self) -> tuple[type["WorkerFailed"], tuple[str, int, int, str]]:
        return type(self), (str(self.args[0]), self.rank, self.worker, self.traceback)


class ControllerLost(TrainError):
    """The controller of a run was stopped for good, or could not be restarted."""


class ReplicasDiffer(TrainError):
    """Workers hold different States, or drew different batches. The message names them."""


class TrainingUnstable(TrainError):
    """The guard had to discard more steps than Guard.most allows."""


class QuorumLost(TrainError):
    """Fewer workers than the minimum were left, and no replacement came in time."""


class TooManyFailures(TrainError):
    """More workers were lost than FailureConfig allows, or many without a step in between."""


class Interrupted(TrainError):
    """Somebody else has stopped the run before its train function was through."""


class SearchError(ElastixError):
    """A campaign cannot continue."""


class NeverReported(SearchError):
    """The train function ended without reporting the campaign's metric."""


class EveryTrialFailed(SearchError):
    """All trials so far failed.

    Attributes:
        traceback: of the first one, as text.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback

    def __reduce__(self) -> tuple[type["EveryTrialFailed"], tuple[str, str]]:
        return type(self), (str(self), self.traceback)
