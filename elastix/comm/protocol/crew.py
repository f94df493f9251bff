"""A worker that is several processes: what its speaker and its followers tell each other. Pure.

A worker may be a *crew* of processes, each at a *place*. The one at place 0 *speaks* for the
worker: it runs the group protocol with the speakers of the other workers. Those at other places
follow it: they obey its words, in order (see follower). Those at one place of all workers are a
*rail*, which reduces what its members hold: a shard of each gradient, say.

Why followers meet nobody: between operations those of one worker wait for each other in collectives
of the user's (clipping, the next forward pass). If each met the other workers by itself, one that
has left an operation would wait there for its mate, and the mate for it in a meeting.

Invariants, by which whatever `recovery` says of workers holds for crews:

- `complete` of a speaker is g only if every place holds all buckets, reduced in rails of g;
- a follower keeps its buckets until its speaker's word, and fills them again only on `Going`
  with `complete` 0: so whoever begins to reduce in g has forgotten older buckets, on each rail;
- what is launched first in a rail is the same on all its members, as all have it from one decision;
  a worker that is behind launches nothing, as its own buckets stand until the result is passed on;
- whoever is told to contribute, or to compute slices of lost workers, does so, whatever it has
  heard since: its mates are in collectives of the worker then, and nobody comes out of these but
  together;
- no place reduces a bucket in a generation in which slices fall to its worker that it has not
  computed: all places of a worker have computed the same ones;
- what a batch is split by is said in `Go` and never concluded: the processes of one worker hear of
  generations at different moments;
- all waits within a worker are for its own places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastix.comm.protocol import calls
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.standing import Standing, deserted, parted
from elastix.comm.protocol.wants import Course, Say
from elastix.errors import TrainError

_FRESH = 2
"""A follower says where it stands as often as the speaker looks: in so many looks, of up to 1 s."""

# ------------------------------------------------------------------ what a speaker says


@dataclass(frozen=True)
class Meeting:
    """The speakers of `members` have met.

    Attributes:
        donor: rank of the worker that gives its State to `newcomers`; None if there are none.
        newcomers: their ranks.
    """

    generation: int
    members: tuple[int, ...]
    donor: int | None = None
    newcomers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Going:
    """How this worker goes on in that generation.

    Attributes:
        operation: in hand, or the next.
        complete: the generation whose buckets stand; 0 if they are reduced again. Never 0 if this
            worker is behind, and its result is going to be passed on.
        void: the operation is done for nothing.
        next_void: so is the one after it.
    """

    generation: int
    operation: int
    complete: int = 0
    void: bool = False
    next_void: bool = False


@dataclass(frozen=True)
class Contribute:
    """Compute what this worker adds to the round of the operation, as the speaker does now.

    Attributes:
        generation: over whose members the work is divided.
        kind: of the operation.
    """

    operation: int
    generation: int
    kind: int


@dataclass(frozen=True)
class TakeOver:
    """Compute the slices of the batch that fall to this worker now, as the speaker does.

    Attributes:
        generation: over whose members they are divided.
    """

    operation: int
    generation: int


@dataclass(frozen=True)
class Gone:
    """The operation was left."""

    operation: int
    outcome: OperationOutcome


@dataclass(frozen=True)
class Go:
    """At a boundary: on to the next operation.

    Attributes:
        plan: the generation over whose members its batch is split.
        members: these.
    """

    operation: int
    plan: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """The worker leaves the group at this boundary, as agreed."""

    generation: int


@dataclass(frozen=True)
class StoreHere:
    """The worker stands still at this boundary, and the State is stored meanwhile."""


# ------------------------------------------------------------------ what a follower says


@dataclass(frozen=True)
class Prepared:
    """It is up to `prepare`."""


@dataclass(frozen=True)
class Held:
    """It holds every bucket of that operation, reduced in that generation's rail."""

    operation: int
    generation: int
    kind: int


@dataclass(frozen=True)
class There:
    """It has the State, or has given it, or need not."""

    generation: int


Order = Meeting | Going | Contribute | TakeOver | Gone | Go | Release | StoreHere
Answer = Prepared | Held | There | Standing
Word = Order | Answer


class Crew:
    """The speaker's side: what it has heard of its followers.

    A crew of one is the default: nothing is said, and nothing waited for.

    Args:
        size: how many processes the worker is.

    Attributes:
        size: this.
        broken: one of them is lost, and the worker with it.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.broken = False
        self._prepared: set[int] = set()
        self._held: dict[int, Held] = {}
        self._there: dict[int, int] = {}
        self._stands: dict[int, Standing] = {}
        self._looks: dict[int, int] = {}  # since these were heard

    @property
    def alone(self) -> bool:
        """Whether the worker is one process."""
        return self.size == 1

    def hear(self, place: int, word: Answer) -> None:
        """A follower says something."""
        self._stands.pop(place, None)  # it has moved
        match word:
            case Prepared():
                self._prepared.add(place)
            case Held():
                self._held[place] = word
            case There(generation):
                self._there[place] = generation
            case Standing():
                self._looks[place] = 0
                self._stands[place] = word

    def parted(self, worker: int, mine: Standing | None) -> TrainError | None:
        """What is wrong, if places of this worker wait for each other for ever; see standing.

        Args:
            worker: its number.
            mine: where the speaker stands; None if it moves.
        """
        self._looks = {place: looks + 1 for place, looks in dict(self._looks).items()}
        if mine is None:
            return None
        stands = {0: mine, **dict(self._stands)}
        error = parted(worker, stands)
        if error is not None or len(stands) < self.size:
            return error
        late = any(self._looks[place] > _FRESH for place in stands if place)
        return None if late else deserted(worker, stands)

    def say(self, word: Order) -> Course[None]:
        """Tell all followers."""
        if not self.alone:
            yield Say(word)

    @property
    def prepared(self) -> bool:
        """Whether all followers are up to `prepare`."""
        return len(self._prepared) == self.size - 1

    def held(self, operation: int, generation: int, kind: int) -> bool:
        """Whether all followers hold that operation's buckets, reduced in that generation.

        Raises:
            TrainError: one of them is in an operation of another kind.
        """
        wanted = Held(operation, generation, kind)
        for place, held in self._held.items():
            if replace(held, kind=kind) == wanted != held:
                raise TrainError(
                    f"the places of a worker have parted in operation {operation}: place 0 is "
                    f"{calls.call(kind)}, place {place} {calls.call(held.kind)}. Nothing can be "
                    "recovered; the run was stopped. All places must make the same calls on ctx "
                    "in the same order."
                )
        return all(self._held.get(place) == wanted for place in range(1, self.size))

    def there(self, generation: int) -> bool:
        """Whether all followers are through with the transfer of the State."""
        return all(self._there.get(place) == generation for place in range(1, self.size))
