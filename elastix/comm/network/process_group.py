"""One process group per generation: build it, use it, abandon it.

torch.distributed's process groups are used directly, without its global default group, so that a
new one can be built while operations of an old one are still stuck. Nothing here retries; what to
do after a failure is decided in protocol.

Invariant: no call blocks on a peer, except inside the builder's own thread.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from elastix.comm.network import shared_memory
from elastix.comm.network.door import CATCH_UP, Address, unreachable
from elastix.comm.network.meeting import MeetingStore
from elastix.comm.network.nccl import GpuGroup
from elastix.comm.network.pending import Pending, bare

Backend = Literal["gloo", "nccl"]
Reduce = Literal["sum", "max"]

_OPERATION_TIMEOUT = timedelta(minutes=30)
_CONNECT_TIMEOUT = timedelta(seconds=30)
_ABANDONED_S = 0.05
_GLOO_THREADS = 8
"""Operations that gloo has under way at once. Of a broken group two members may each wait for what
the other has in its queue; what is not in a queue fails on its own, and the group is let go."""
_REDUCE = {"sum": dist.ReduceOp(dist.ReduceOp.SUM), "max": dist.ReduceOp(dist.ReduceOp.MAX)}


class _SharedPending(Pending):
    """Through memory that the members share."""

    def __init__(
        self, reduction: shared_memory.Reduction, exchange: shared_memory.Exchange
    ) -> None:
        self._reduction = reduction
        self._exchange = exchange

    def finished(self) -> bool:
        return self._reduction.over.is_set()

    def on_finish(self, callback: Callable[[], None]) -> None:
        self._reduction.on_finish(callback)

    def settle(self) -> BaseException | None:
        self.norm = self._reduction.norm
        return self._reduction.error

    def let_go(self) -> bool:
        self._exchange.stop()  # also if it is over here: peers may still read what it left
        return True


class _Done(Pending):
    """Over before anybody asks."""

    def __init__(self) -> None:
        self._error = None
        self._future = None

    def settle(self) -> BaseException | None:
        return None


class Group:
    """Some members of one generation. Operations are asynchronous and never raise.

    Only torch.AcceleratorError, where the device of this process fails, is let through.

    Args:
        wiring: who they are.
        process_group: gloo's.
        exchange: of members that share memory.
        gpus: what carries the tensors of their GPUs; None: gloo does that too.
    """

    def __init__(
        self,
        wiring: "Wiring",
        process_group: Any,  # noqa: ANN401
        exchange: shared_memory.Exchange | None = None,
        gpus: GpuGroup | None = None,
    ) -> None:
        self.generation = wiring.generation
        self.members = wiring.members
        self.rank = wiring.rank
        self.size = len(wiring.members)
        self._pg = process_group
        self._exchange = exchange
        self._gpus = gpus
        self._pending: list[Pending] = []

    @property
    def shares_memory(self) -> bool:
        """Whether all members see each other's memory."""
        return self._exchange is not None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        reduce: Reduce = "sum",
        room: shared_memory.SharedBuffer | None = None,
        measured: int = 0,
    ) -> Pending:
        """Reduce `tensor` in place over all members.

        Args:
            tensor: on all members of one shape.
            reduce: sums, or the maximum.
            room: the memory that it fills, if any.
            measured: elements, from the first on, whose norm is wanted if it can be had cheaply.
        """
        if room is not None and self._exchange is not None:
            reduction = self._exchange.all_reduce(room, tensor, reduce == "sum", measured)
            return _SharedPending(reduction, self._exchange)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[reduce]
        return self._start(tensor, lambda group: group.allreduce([tensor], options))

    def through_memory(
        self,
        room: shared_memory.SharedBuffer,
        sizes: Sequence[int],
        work: shared_memory.Contribution,
    ) -> Pending:
        """See Exchange.begin. Only if the members share memory."""
        if self._exchange is None:
            raise ValueError("these members do not share memory")
        return _SharedPending(self._exchange.begin(room, sizes, work), self._exchange)

    def all_gather(self, tensor: torch.Tensor, into: list[torch.Tensor]) -> Pending:
        """Collect everybody's `tensor` in rank order; all have one shape."""
        return self._start(tensor, lambda group: group.allgather([into], [tensor]))

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Pending:
        """Give each member its part of `sent`; sizes by rank, in elements, may be 0."""
        return self._start(
            sent,
            lambda group: group.alltoall_base(
                received, sent, list(received_sizes), list(sent_sizes), dist.AllToAllOptions()
            ),
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Overwrite `tensor` with that of rank `root`."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start(tensor, lambda group: group.broadcast([tensor], options))

    def _start(self, tensor: torch.Tensor, launch: Callable[[Any], Any]) -> Pending:
        if self._gpus is not None and tensor.is_cuda:
            pending = self._gpus.start(launch)
        else:
            try:
                pending = Pending(launch(self._pg))
            except torch.AcceleratorError:
                raise
            except RuntimeError as error:  # a connection that is known to be broken
                return Pending(None, bare(error))
        self._pending = [p for p in self._pending if p.writes]
        self._pending.append(pending)
        return pending

    def unblock(self) -> None:
        """Whatever is under way on GPUs fails. At once, and in any thread."""
        if self._gpus is not None:
            self._gpus.give_up()
            threading.Thread(
                target=self._gpus.abort, name=f"unblock-{self.generation}", daemon=True
            ).start()

    def abandon(self) -> None:
        """Leave the group without waiting for anybody.

        gloo cannot interrupt an operation that waits for a dead peer, and destroying the group
        would wait for it. So a thread of its own keeps the group, with the buffers that its
        operations may still write, until they end by themselves; closing it then ends the
        operations of peers that wait for us. NCCL's are aborted there, which takes long.
        """
        if self._gpus is not None:
            self._gpus.give_up()
        if self._exchange is not None:
            self._exchange.stop()
        leftovers, self._pending = self._pending, []
        group, self._pg = self._pg, None
        rest = (group, self._gpus, leftovers)
        threading.Thread(
            target=_bury, args=rest, name=f"bury-{self.generation}", daemon=True
        ).start()


class Alone(Group):
    """A group of one: no process group, no connection, every operation is over at once."""

    def __init__(self, wiring: "Wiring") -> None:
        super().__init__(wiring, None)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        reduce: Reduce = "sum",
        room: shared_memory.SharedBuffer | None = None,
        measured: int = 0,
    ) -> Pending:
        """The sum over one."""
        del tensor, reduce, room, measured
        return _Done()

    def all_gather(self, tensor: torch.Tensor, into: list[torch.Tensor]) -> Pending:
        """A copy."""
        into[0].copy_(tensor)
        return _Done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Nobody listens."""
        del tensor, root
        return _Done()

    def abandon(self) -> None:
        """Nothing is under way."""


def _bury(group: Any, gpus: GpuGroup | None, pending: list[Pending]) -> None:  # noqa: ANN401
    if gpus is not None:
        gpus.abort()
    for operation in pending:
        over = threading.Event()
        operation.on_finish(over.set)
        over.wait()
    del group


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What is needed to build a group: who, where to meet, over what.

    Attributes:
        address: of the Rendezvous.
        interface: name or address under which this process is reached by gloo's peers.
        backend: what carries the tensors of GPUs. All others go by gloo.
        members: worker ids in rank order.
        me: this worker's id.
        scope: distinguishes several groups of one generation.
        shared: members on one host reduce through memory that they share.
        secret: of the run; whoever has it is taken for one of its workers.
        catch_up: where this worker's CatchUpSender listens; None while it has none.
        place: of this process in its worker's crew. Those at one place of all workers meet.
        device: that this process computes on.
    """

    address: Address
    interface: str
    backend: Backend
    me: int
    secret: bytes = field(default=b"", repr=False)
    catch_up: Address | None = None
    generation: int = 0
    members: tuple[int, ...] = ()
    scope: str = "all"
    shared: bool = True
    place: int = 0
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    @property
    def bulk(self) -> torch.device:
        """Where large tensors lie when they go to other members."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def meeting(self) -> str:
        """Name of the meeting of a group's members."""
        rail = f"-{self.place}" if self.place else ""
        return f"{self.generation}-{self.scope}{rail}"

    @property
    def rank(self) -> int:
        """This worker's place among the members."""
        return self.members.index(self.me)


class Builder:
    """Builds a Group in a thread of its own; calls `done` when `result` is set.

    The thread ends within seconds of `abandon`, or of its connection timeout.

    Attributes:
        unreachable: when it has failed, the members that could not be reached from here; this
            worker itself, if it can reach no meeting or has no network to offer.
    """

    def __init__(self, wiring: Wiring, done: Callable[[], None]) -> None:
        self.result: Group | BaseException | None = None
        self.unreachable: frozenset[int] = frozenset()
        self.generation = wiring.generation
        self._wiring = wiring
        self._done = done
        self._lock = threading.Lock()
        self._abandoned = False
        self._outdated = False
        self._meeting: MeetingStore | None = None
        name = f"build-{wiring.generation}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether the group is there."""
        return isinstance(self.result, Group)

    @property
    def failed(self) -> BaseException | None:
        """Why there will be no group; None while there may be one."""
        return self.result if isinstance(self.result, BaseException) else None

    def abandon(self) -> None:
        """Nobody wants the group any longer; one that is ready or under way is abandoned too."""
        with self._lock:
            self._abandoned = True
            if isinstance(self.result, Group):
                self.result.abandon()
            elif self._meeting is not None:
                self._meeting.close()

    def unblock(self) -> None:
        """Its generation is outdated: what connects GPUs fails. At once, and in any thread.

        A kernel that waits there for a lost peer would hold up all that waits for the device.
        """
        self._outdated = True

    def _run(self) -> None:
        result: Group | BaseException
        try:
            result = self._build()
        except Exception as error:  # noqa: BLE001 - whoever waits for a result gets it, whatever it is
            result = bare(error)
        with self._lock:
            self.result = result
            if self._abandoned and isinstance(result, Group):
                result.abandon()
        self._done()

    def _build(self) -> Group:
        self.unreachable = frozenset([self._wiring.me])
        with self._lock:
            if self._abandoned:
                raise RuntimeError("abandoned before it came to the meeting")
        wiring = self._wiring
        meeting = MeetingStore(wiring.address, wiring.secret, wiring.me, wiring.meeting)
        with self._lock:
            self._meeting = meeting
        try:
            return self._connect(meeting)
        finally:
            meeting.close()

    def _connect(self, meeting: MeetingStore) -> Group:
        wiring = self._wiring
        rank, size = wiring.rank, len(wiring.members)
        shares = wiring.shared and wiring.backend == "gloo" and wiring.scope == "all"
        mine = json.dumps([wiring.catch_up, shared_memory.introduce() if shares else ""])
        everybody = [f"here-{other}" for other in range(size)]
        # Members come when they reach their next operation, and that may take long. Connecting
        # only when all are here keeps its timeout short.
        said = meeting.arrive(f"here-{rank}", mine.encode(), everybody, lambda: self._abandoned)
        if not said:
            raise RuntimeError("abandoned before all members were there")
        self.unreachable = frozenset()
        catch_ups, introductions = zip(*(json.loads(text) for text in said), strict=True)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=wiring.interface)
        except RuntimeError:
            self.unreachable = frozenset([wiring.me])
            raise
        options._threads = _GLOO_THREADS
        options._devices = [device]
        options._timeout = _CONNECT_TIMEOUT
        try:
            group: Any = dist.ProcessGroupGloo(meeting, rank, size, options)
        except RuntimeError:
            self.unreachable = self._missed(meeting, catch_ups)
            raise
        group._set_default_timeout(_OPERATION_TIMEOUT)
        if wiring.backend == "nccl":
            gpus = GpuGroup(meeting, rank, size, wiring.device)
            gpus.connect(lambda: self._abandoned or self._outdated)
            return Group(wiring, group, gpus=gpus)
        if not shares:
            return Group(wiring, group)
        mates = shared_memory.meet(introductions)
        if not self._all_see_all(Group(wiring, group), bool(mates)):
            return Group(wiring, group)
        return Group(wiring, group, shared_memory.Exchange(wiring.generation, rank, mates))

    def _missed(
        self, meeting: MeetingStore, catch_ups: Sequence[list[Any] | None]
    ) -> frozenset[int]:
        """Members that do not answer, or had nothing to say on how to connect to them."""
        wiring = self._wiring
        others = [member for member in wiring.members if member != wiring.me]
        try:
            silent = frozenset(others) - meeting.writers()
        except OSError:  # this worker has left the meeting, or cannot reach it any more
            return frozenset() if self._abandoned else frozenset([wiring.me])
        asked = {
            member: (str(catch_up[0]), int(catch_up[1]))
            for member, catch_up in zip(wiring.members, catch_ups, strict=True)
            if catch_up is not None and member != wiring.me
        }
        return silent | unreachable(asked, CATCH_UP, wiring.secret)

    def _all_see_all(self, group: Group, here: bool) -> bool:
        """Whether it is so for every member: they must all do the same."""
        blind = torch.tensor([int(not here)], device="cpu")
        over = threading.Event()
        pending = group.all_reduce(blind, "max")
        pending.on_finish(over.set)
        while not over.wait(_ABANDONED_S):
            if self._abandoned:
                group.abandon()
                raise RuntimeError("abandoned before all members had agreed")
        error = pending.settle()
        if error is not None:
            raise error
        return not blind.item()
