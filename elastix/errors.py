"""Every exception that elastix raises on purpose.

    ElastixError
    ├── ConfigError (ValueError)   the call is wrong; no work has started
    │   └── EmptySpace             a search space without a valid configuration
    ├── StateError                 something cannot be part of a State, or does not fit one
    ├── StoreError                 what is on disk, or should be
    │   ├── NotFound
    │   ├── Corrupt
    │   ├── TooNew                 written by a later version of elastix
    │   ├── Conflict               somebody else was first, or still needs it
    │   ├── Full                   no room on the disk
    │   └── ReadOnly
    ├── TrainError                 a run that cannot go on
    │   ├── WorkerFailed           the train function raised: the user's own error, with its rank
    │   ├── ControllerLost         the process that leads the run is gone and did not come back
    │   ├── ReplicasDiffer         workers that should hold the same State, or draw alike, do not
    │   ├── TrainingUnstable       the guard had to leave out more batches than it may
    │   ├── QuorumLost             fewer workers than the minimum, and none came in time
    │   └── TooManyFailures        more losses than FailureConfig allows
    └── SearchError                a campaign that cannot go on
        ├── NeverReported          the train function did not report the metric
        └── EveryTrialFailed       no trial got through: the user's own error, the first of them

The class says whose fault it is. A message is the fact with its values, what elastix did about
it, and what to do next.
"""


class ElastixError(Exception):
    """Root of the tree: `except elastix.ElastixError` catches all of it and nothing else."""


class ConfigError(ElastixError, ValueError):
    """The call itself is wrong. Raised before any work starts."""


class EmptySpace(ConfigError):
    """No configuration of the search space is valid."""


class StateError(ElastixError):
    """An object cannot be captured into a State, or a State does not fit the object."""


class StoreError(ElastixError):
    """Something about stored States."""


class NotFound(StoreError):
    """No stored State under that name."""


class Corrupt(StoreError):
    """A stored State is not what was written."""


class TooNew(StoreError):
    """The file was written by a later version of elastix than this one."""


class Conflict(StoreError):
    """Somebody else changed it first, owns it, or still refers to it."""


class Full(StoreError):
    """There is no room left where the store is kept."""


class ReadOnly(StoreError):
    """The store may be read, not written."""


class TrainError(ElastixError):
    """A training run cannot go on."""


class WorkerFailed(TrainError):
    """The train function raised on one worker; the others were stopped.

    Attributes:
        rank: rank of the worker when it raised.
        worker: its id.
        traceback: the worker's own traceback, as text.
        shown: it was printed already, and the error's text does without it.
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
    """The controller of a run was ended for good, or could not be started again."""


class ReplicasDiffer(TrainError):
    """Workers hold different States, or did different things in a step. The message names them."""


class TrainingUnstable(TrainError):
    """The guard had to leave out more batches than Guard.most allows."""


class QuorumLost(TrainError):
    """Fewer workers than the minimum were left, and no replacement came in time."""


class TooManyFailures(TrainError):
    """More workers were lost than FailureConfig.max_worker_losses allows."""


class SearchError(ElastixError):
    """A campaign cannot go on."""


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
