"""Gradient averaging that can be done again: DDP's overlap, then a commit round.

Hooks on the parameters copy each gradient, scaled by this worker's share of the batch, into flat
buckets, which are reduced while the rest of backward runs. At the end of backward the group
agrees in a round (protocol) that everybody holds every bucket; only then `param.grad` becomes
the average. Until the next backward the local gradients stay as autograd left them, so after a
failure all buckets can be filled and reduced again by whoever is left.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, algorithm 1 (buckets in reverse order of parameters, overlapped with backward).

Not here: gradients before buckets take them (local_gradients), passes that are no step by
themselves (accumulation), how much a worker counts and what follows from a step (steps).

A backward pass may run further ones inside it (see backward_passes). Where that happens a parameter
may get its gradient in several pieces, so buckets are launched at the end.

Buffers are reduced while backward runs, too. The last bucket of gradients is launched when it has
ended, and tells whether they have moved since; they are then reduced once more.

Invariant: no `param.grad` and no buffer of a module changes before the step is agreed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.accumulation import Accumulation
from elastix.comm.gradients.backward_passes import BackwardPasses, abandoned
from elastix.comm.gradients.bucket import Bucket
from elastix.comm.gradients.buckets import build_buckets
from elastix.comm.gradients.buffer_bucket import BufferBucket
from elastix.comm.gradients.gpu_streams import GpuStreams
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.local_gradients import LocalGradients
from elastix.comm.gradients.prepared_tensors import PreparedTensors
from elastix.comm.gradients.slice_digests import Sum
from elastix.comm.gradients.slice_passes import SlicePasses
from elastix.comm.gradients.steps import Steps, Weights
from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.slice_tree import Node
from elastix.errors import ConfigError, TrainError


class Reducer:
    """The training step as an operation of GroupDriver.

    Args:
        modules: their parameters that require a gradient are averaged, their buffers kept equal.
        driver: runs the operation.
        steps: see Steps.
        may_void: a step may turn out void, so that buffers must be put back.
        measured: `norm` is going to be asked for.
        wire: what gradients of float32 and float64 travel as; None: as they are.
        piped: see Accumulation.

    Attributes:
        accumulation: of passes that are no step by themselves.

    Raises:
        ConfigError: nothing requires a gradient, or a tensor is of a type that cannot be averaged.
    """

    kind = OperationKind.STEP
    together = False
    reduce: Reduce = "max"
    hooked = True  # a backward pass begins the step, and ends it

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        driver: GroupDriver,
        steps: Steps,
        *,
        may_void: bool,
        measured: bool = False,
        wire: torch.dtype | None = None,
        piped: bool = False,
    ) -> None:
        self._piped = piped
        self._driver = driver
        self._steps = steps
        self._may_void = may_void
        self._buckets = build_buckets(modules, wire)
        self._gradients = [b for b in self._buckets if isinstance(b, GradientBucket)]
        self._buffers = [b for b in self._buckets if isinstance(b, BufferBucket)]
        if not self._gradients:
            none = not any(True for module in modules for _ in module.parameters())
            raise ConfigError(
                "the prepared model has no parameters. Nothing was prepared. Layers that it keeps "
                "in a plain list or dict are unknown to torch: use torch.nn.ModuleList or "
                "ModuleDict, or give ctx.prepare each of them."
                if none
                else "no parameter of the prepared model requires a gradient. Nothing was "
                "prepared. Unfreeze some, or leave out ctx.prepare."
            )
        whatever_else = [b for b in self._buckets if b not in self._gradients]
        self._buffers_first = [*whatever_else, *self._gradients]
        self._counter = next(bucket for bucket in self._buckets if bucket.counts)
        self._weights = Weights([1.0], 1, 1)
        self._slices = SlicePasses()
        self._local = LocalGradients(self._gradients, steps, piped=piped)
        self.accumulation = Accumulation(
            self._local, steps, self._slices, self._take_step, piped=piped
        )
        self._counts = True  # this worker has a share in it
        self._told = False  # that there was a pass since the last batch
        self._hooks: list[RemovableHandle] = []
        self._generation = 0  # of the group in which buckets are being launched
        self._launched = 0
        self._active = False  # a step has begun and not ended
        # Gradients are final and count, so buckets take them; what they lack `prepare` sees to.
        self._fills = False
        self._passes = BackwardPasses(self._within, self._end)
        self._streams = GpuStreams()
        self._void = False  # the last step was
        self._prepared = PreparedTensors(modules, self._gradients, self._buffers)
        for bucket in self._gradients:
            bucket.measured = measured
            for place, parameter in enumerate(bucket.parameters if self.hooked else ()):
                hook = self._hook(bucket, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self.remember_buffers()

    def close(self) -> None:
        """Nothing is averaged any more.

        Hooks of a sharded parameter are kept by what Python's collector does not see, and with them
        all that they refer to.
        """
        for hook in self._hooks:
            hook.remove()
        self._step_over()

    def turn(self, ratio: int, counts: bool) -> None:
        """A batch was drawn that further passes are about; they have this ratio of the step.

        Args:
            ratio: its place among the weights of the step.
            counts: whether this worker has a share. If not, what its forward passes do to buffers
                will be undone.

        Raises:
            ConfigError: gradients of the step so far were changed.
        """
        self._local.look_if_changed()
        if ratio != self._local.ratio:
            for buffers in self._buffers:
                buffers.turn_from(self._local.ratio) if self._counts else buffers.undo()
            self._local.turn_to(ratio)
        self._counts, self._told = counts, False
        for buffers in self._buffers:
            buffers.let_go() if counts else buffers.hold()

    # --------------------------------------------------------------------- slices of a batch

    def begin_slices(self) -> None:
        """A step begins whose passes are about slices: see data.slice_assignment.

        Their gradients add up in `param.grad`, and buffers are put back before each, so that it
        starts from what the step started from. What gradients there were are kept, and added to
        what is agreed on.
        """
        self._slices.open = self._slices.fresh = True
        self._generation = self._launched = 0
        for gradients in self._gradients:
            gradients.begin_slices()
        self._steps.carried([p for gradients in self._gradients for p in gradients.carried])
        for buffers in self._buffers:
            buffers.begin_slices()
        self._prepared.remember()

    def begin_slice(self, number: int, ratio: int, last: bool) -> None:
        """Further passes are about a slice.

        Args:
            number: of it.
            ratio: its place among the scales of the step's weights.
            last: no other falls to this worker, as far as it knows.
        """
        del number  # all that this worker has computed is one sum
        self._slices.begin_slice(last)
        if ratio != self._local.ratio:
            self._local.turn_to(ratio)
            for gradients in self._gradients:
                gradients.turn_all_to(ratio)

    def digest_slice(self) -> None:
        """Nothing: gradients of slices are one sum here, and are not compared."""

    def begin_again(self, number: int, ratio: int, *, early: bool) -> None:
        """Nothing: no slice is computed again."""
        del number, ratio, early

    def sums(self) -> Mapping[Node, Sum]:
        """What this worker has added to the last gradient: nothing that could be told apart."""
        return {}

    @property
    def digest(self) -> tuple[int, int]:
        """Of what a slice gave, where that is wanted."""
        return 0, 0

    def end_slice(self, counts: bool) -> None:
        """The passes about it are over.

        Args:
            counts: it was no placeholder.

        Raises:
            ConfigError: there was none, or another number of them than usual; or gradients were
                changed meanwhile.
        """
        self.check()
        self._slices.end_slice()
        self._local.look_if_meddled()
        self._keep_slice(counts)

    def _keep_slice(self, counts: bool) -> None:
        """Its gradients stay in the sum, if it counts, and so does what it has done to buffers."""
        for buffers in self._buffers:
            buffers.end_slice(self._local.ratio, counts)
        if not counts:
            for gradients in self._gradients:
                gradients.forget_slice()

    def end_slices(self) -> bool:
        """All slices that fall to this worker are computed: do the rest of the step. Collective.

        Returns:
            Whether it is over. If not, slices of lost workers fall to this one; to be called again
            when they are computed.

        Raises:
            ConfigError: parameters were changed meanwhile.
        """
        if self._slices.suspended:
            outcome = self._driver.resume()
        else:
            self._prepared.look_if_moved()
            self._driver.phase("filled", len(self._buckets))
            outcome = self._driver.begin(self)
        self._slices.suspended = outcome is None
        if outcome is None:
            return False
        self._slices.open = False
        for buffers in self._buffers:
            buffers.let_go()
        self._step_over()
        self._steps.committed(outcome)
        return True

    def _step_over(self) -> None:
        self._streams.forget()
        self._local.over()
        self.accumulation.over()
        self._told = False

    @property
    def passes(self) -> int:
        """How many backward passes each slice has; 0 if that is not known yet."""
        return self._slices.usual or 0

    @property
    def frozen(self) -> list[int]:
        """Places, among all parameters that are averaged, of those that need no gradient now."""
        every = (p for gradients in self._gradients for p in gradients.parameters)
        return [place for place, parameter in enumerate(every) if not parameter.requires_grad]

    def rebase(self) -> None:
        """All workers hold the same buffers now. Call it whenever a State was loaded."""
        self._step_over()
        self._local.forget()
        for buffers in self._buffers:
            buffers.rebase()
        self.remember_buffers()

    def has_unaveraged(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of these has a gradient that no step has handed back."""
        return self._prepared.has_unaveraged(parameters)

    def check(self, thoroughly: bool = False) -> None:
        """Between steps: that the last one has ended, and nothing was left out of it.

        Args:
            thoroughly: look for parameters and buffers that were added, too; it takes a walk over
                the modules.

        Raises:
            ConfigError: backward was left by an exception, a parameter is trained that was not
                prepared for it, or a buffer was not.
        """
        if self._active or self.accumulation.left:
            raise abandoned()
        self._prepared.check(thoroughly)

    # --------------------------------------------------------------------- during backward

    def _hook(self, bucket: GradientBucket, place: int) -> Callable[[torch.Tensor], None]:
        gradients, accumulation = self._local, self.accumulation

        def gradient_ready(parameter: torch.Tensor) -> None:
            self._streams.note(parameter)
            bucket.came.add(place)
            if gradients.aside:
                return  # it is looked at when all are there
            if self._piped:
                raise _outside_of_backward()
            if gradients.set_out or bucket.left:
                gradients.look_for_left(bucket, place)
            if gradients.apart:
                bucket.added(place)
            if accumulation.deferred:
                bucket.note(place)
                if not self._told:
                    self._told = True
                    self._steps.passed()
                return
            if self._slices.open:
                bucket.added_in_slice(place)
            elif not self._active:
                gradients.look_if_changed(bucket, place)
            self._passes.within()
            # A hook of the user's that comes after this one may still change it.
            if self._fills and _last_hook(parameter) is gradient_ready:
                self._fill(bucket, place)

        return gradient_ready

    def _fill(self, bucket: GradientBucket, place: int) -> None:
        """A gradient is final, if backward passes do not nest; else more may be added to it."""
        if bucket.pending is not None or bucket.collected(place):
            raise ConfigError(
                "a parameter got a second gradient within one backward pass, after the first "
                "had gone to the other workers. The step was not taken; the run ends. Use "
                "checkpoint(..., use_reentrant=False), or checkpoint from the first step on."
            )
        if bucket.missing <= 1:  # others are copied as well, which other streams may have computed
            self._streams.join(bucket.flat.device)
        bucket.fill(place, self._weights.scales, self._local.ratio)
        if not (bucket.missing or self._passes.nest):
            self._launch_filled()

    def _within(self) -> None:
        """A backward pass brings a gradient, or comes to one."""
        if not self._active:
            self._begin()

    def _begin(self) -> None:
        """The first gradient of a step is there, or all are."""
        self.check()
        self._active, self._fills = True, False
        if self._slices.open:
            self._begin_slice_pass()
            if not self._slices.launching:
                return
        if self._driver.watching:
            return
        self._weigh(self._driver.generation)
        if not self._slices.open:
            for bucket in self._buckets:
                bucket.begin()
        self._fills = self._passes.nest is False
        if self._fills and not self._slices.open:
            for buffers in self._buffers:
                buffers.fill_early(self._weights.scales, self._local.ratio)
        self._launch_filled()

    def _begin_slice_pass(self) -> None:
        self._slices.begin_pass()
        self._local.look_if_meddled()
        if self._slices.fresh:
            self._slices.fresh = False
            for bucket in self._buckets:
                bucket.begin()

    def _weigh(self, generation: int) -> None:
        """The buckets are to be reduced by the members of that generation, from the first on."""
        self._weights = self._steps.weights(self._driver.members(generation))
        self._generation = generation
        self._launched = 0

    @property
    def _order(self) -> list[Bucket]:
        """In which buckets are launched, by all workers alike.

        Buffers come first, since they are there when backward begins. What a step in slices does to
        them is known only when the last slice is computed.
        """
        return self._buckets if self._slices.open else self._buffers_first

    @property
    def _ahead(self) -> bool:
        """Whether buffers are launched before backward has ended, and may move after it."""
        return bool(self._buffers) and not self._slices.open

    def _launch_filled(self) -> None:
        """Launch what is full, in order. The last tells whether buffers have moved meanwhile."""
        group = self._driver.group
        if group is None or group.generation != self._generation or not self._driver.usable:
            return  # the group is changing; `prepare` and `launch` see to everything
        order = self._order
        up_to = len(order) - self._ahead
        while self._launched < up_to and not order[self._launched].missing:
            self._launch_next(group)

    def _launch_next(self, group: Group) -> None:
        self._driver.phase("bucket", self._launched)
        bucket = self._order[self._launched]
        self._streams.join(bucket.flat.device)
        last = self._ahead and self._launched + 1 == len(self._order)
        moved = [buffers.moved() for buffers in self._buffers] if last else []
        bucket.launch(group, self._weights.share, moved)
        if self._driver.on_reduced is not None and bucket.pending is not None:
            bucket.pending.on_finish(partial(self._driver.on_reduced, self._launched))
        self._launched += 1

    # ------------------------------------------------------------------- the end of backward

    def _take_step(self) -> None:
        """All gradients of it are there."""
        with self._passes.as_nested():  # nothing is filled before
            self._begin()
            self._end()

    def _end(self) -> None:
        self._active = False
        self._passes.over()
        if self._slices.open:
            self._slices.end_pass()
            return
        self._counts = self._counts and not self._driver.watching
        for buffers in self._buffers:
            buffers.let_go() if self._counts else buffers.undo()
        self._driver.phase("filled", len(self._buckets))
        outcome = self._driver.run(self)
        self._step_over()
        if not self._counts:  # the next step may be about the same batch
            for buffers in self._buffers:
                buffers.hold()
        self._steps.committed(outcome)

    def accept(self, outcome: OperationOutcome) -> None:
        """Gradients and buffers become what was agreed on."""
        self._streams.wait_for_current()
        self._void = self._steps.voided(outcome.result)
        if self._void:
            self._leave_no_trace()
            return
        factor = self._factor()
        if self._slices.open and factor != 1:
            raise TrainError("a step lacks slices of its batch; this is a bug in elastix.")
        if factor is None:  # all of a tiny batch was lost with its workers
            for gradients in self._gradients:
                gradients.drop()
            return
        for bucket in self._buckets:
            bucket.accept(factor)
        self._remember_accepted()

    def _factor(self) -> float | None:
        """After the reduction: makes of the sum in the buckets the mean over those who took part.

        None if nobody has samples.
        """
        # Who has reduced them alone need not wait for a GPU; they may stand in a smaller group.
        alone = not self._slices.open and len(self._driver.members(self._generation)) == 1
        samples = self._weights.share if alone else self._counter.samples()
        return self._weights.total / samples if samples else None

    def norm(self) -> float | None:
        """Of the gradient that is about to be agreed on; None if nobody has samples.

        For the payload of the step: all buckets are reduced, and equal on all workers.
        """
        factor = self._factor()
        if factor is None:
            return None
        return factor * math.hypot(*(bucket.norm() for bucket in self._gradients))

    @property
    def kept_buffers(self) -> list[torch.Tensor]:
        """Buffers as they were when the step began, as far as they are part of a State.

        Only where a step may be void.
        """
        return [tensor for buffers in self._buffers for tensor in buffers.remembered]

    def set_out(self) -> None:
        """At a boundary: a State is captured as things are now, and has no gradients."""
        self._local.set_out = True
        self.remember_buffers()

    def remember_buffers(self) -> None:
        """Buffers may have to be put back to what they are now, if a step may be void."""
        for buffers in self._buffers if self._may_void else ():
            buffers.remember()

    def _remember_accepted(self) -> None:
        keeps = self._may_void and not self._steps.undone
        for buffers in self._buffers if keeps else ():
            buffers.remember_accepted()

    def _leave_no_trace(self) -> None:
        self._drop_void()
        self.put_back_buffers()

    def _drop_void(self) -> None:
        """What is of another pass on the batch stays, if the step is one of a further pass."""
        for gradients in self._gradients:
            gradients.drop_new() if self._steps.further else gradients.drop()

    def put_back_buffers(self) -> None:
        """Buffers have the values again that they had at the last boundary.

        Only where a step may be void. One that is may change them again when it has been agreed on.
        """
        for buffers in self._buffers:
            buffers.put_back()

    def stand_in(self, value: float) -> set[int]:
        """After a step that is void: gradients, so that code that looks at them goes on.

        Returns:
            Ids of parameters that have one of another pass on the batch, which is used.
        """
        spared = set()
        for gradients in self._gradients:
            for parameter in gradients.parameters:
                if parameter.grad is not None:
                    spared.add(id(parameter))
                elif parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, value, requires_grad=False)
        return spared

    def parts(self) -> Sequence[torch.Tensor]:
        """The buckets as they were accepted, one after the other; none if nothing was."""
        if self._void or not self._counter.samples():
            return []
        return [bucket.accepted() for bucket in self._buckets]

    def imitate(self, watched: Watched) -> None:
        """Take over gradients and buffers that others agreed on, instead of one's own."""
        self._steps.watched(watched.result)
        for bucket, flat in zip(self._buckets, watched.parts, strict=False):
            bucket.imitate(flat)
        if watched.parts:
            self._remember_accepted()
        else:  # and buffers were put back after a forward pass of placeholders
            self._drop_void()

    def lacks(self, members: Sequence[int]) -> bool:
        """Whether slices fall to this worker that it has not computed."""
        return self._slices.open and self._steps.lacks(members)

    def prepare(self, generation: int) -> None:
        """Fill what is not yet filled for that generation; everything, if it is a new one."""
        if self.lacks(self._driver.members(generation)):
            return  # gradients are not complete yet
        if generation != self._generation:
            self._weigh(generation)
            for bucket in self._buckets:
                bucket.restart()
        for bucket in self._order[self._launched :]:
            bucket.fill_missing(self._weights.scales, self._local.ratio)

    def launch(self, group: Group) -> Iterator[Pending]:
        """Launch what is not yet launched in `group`.

        Backward may have moved buffers after they were launched: it runs forward again where
        activations are checkpointed. If that is so anywhere, all launch them again.
        """
        self.prepare(group.generation)
        while self._launched < len(self._buckets):
            self._launch_next(group)
        yield from _pendings(self._order)
        if self._ahead and self._order[-1].anybody_stale():
            for buffers in self._buffers:
                buffers.renew()
                buffers.fill_missing(self._weights.scales, self._local.ratio)
                buffers.launch(group, self._weights.share)
            yield from _pendings(self._buffers)

    def payload(self, group: Group) -> torch.Tensor:
        """The commit round carries the vote."""
        del group
        return self._steps.vote()

    def detail(self) -> int | None:
        """Nothing: the vote carries it."""
        return None


def _last_hook(parameter: torch.Tensor) -> object:
    return next(reversed(parameter._post_accumulate_grad_hooks.values()))


def _outside_of_backward() -> ConfigError:
    return ConfigError(
        "a backward pass was run outside of ctx.backward(), and crew has an axis "
        "'pipe': a pass may be that of one micro-batch. The step was not taken; the "
        "run ends. Write: with ctx.backward(): schedule.step(...)"
    )


def _pendings(buckets: Iterable[Bucket]) -> list[Pending]:
    return [bucket.pending for bucket in buckets if bucket.pending is not None]
