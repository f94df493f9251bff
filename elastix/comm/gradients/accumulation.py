"""Backward passes that add up to one step: ctx.accumulate(), and ctx.backward() that takes it.

Outside of both each backward pass is a step (reducer), as with torch's DDP, whose `no_sync` is what
ctx.accumulate() is. ctx.backward() takes the step at its exit, over whatever gradients are there,
whoever has put them there: a pipeline's schedule scales them, and may compute them without any hook
being called.

Invariant: after a pass of ctx.backward() was left by an exception no step is taken any more, as
nobody knows what there is of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from elastix.comm.gradients import pipeline_scales
from elastix.comm.gradients.local_gradients import LocalGradients
from elastix.comm.gradients.slice_passes import SlicePasses
from elastix.comm.gradients.steps import Steps
from elastix.errors import ConfigError


class Accumulation:
    """See the module.

    Args:
        gradients: of this worker.
        steps: hear of passes that are no step.
        slices: of the step in hand, if it is one in slices.
        take_step: takes the step whose gradients are all there.
        piped: a backward pass is about a part of the batch, and only `step_at_exit` takes steps.

    Attributes:
        deferred: passes add to the gradients, and no step is taken.
        left: a pass was left by an exception.
    """

    def __init__(
        self,
        gradients: LocalGradients,
        steps: Steps,
        slices: SlicePasses,
        take_step: Callable[[], None],
        *,
        piped: bool,
    ) -> None:
        self.deferred = self.left = False
        self._gradients = gradients
        self._steps = steps
        self._slices = slices
        self._take_step = take_step
        self._piped = piped
        self._ran = False  # the last passes that were set aside have given gradients
        self._added_up = False  # there were such ones, and the step is not taken

    def over(self) -> None:
        """The step is taken, or what there was of it counts no more."""
        self._added_up = False

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Within it backward adds to the local gradients, and no step is taken.

        Raises:
            ConfigError: they were changed since the last time.
        """
        self._gradients.look_if_changed()
        before, self.deferred = self.deferred, True
        try:
            with pipeline_scales.refused() if self._piped else nullcontext():
                yield
        finally:
            self.deferred = before
            # Whether or not this worker had anything to learn from, so that all say it alike.
            self._steps.passed()

    @contextmanager
    def step_at_exit(self) -> Iterator[None]:
        """Within it backward adds to the local gradients; the step is taken at its exit.

        Within `adding` it is not. In a step of slices all of its passes are one.

        Raises:
            ConfigError: see `adding`; or a stage of a pipeline was given no gradient.
        """
        deferred = self.deferred
        if not (self._piped or self._slices.open):
            if deferred:  # a further pass of a step that is added up
                yield
                return
            with self.adding(), self._left_at_no_exception():
                yield
        elif self._slices.open:
            self._gradients.look_if_meddled()
            with self._set_aside():
                yield
            if not self._ran:
                return  # as where there was no pass
        else:
            if not self._added_up:
                self._steps.carried(self._gradients.not_zero)
            with self.adding(), self._set_aside():
                yield
            self._added_up = deferred
        if deferred:
            return
        self._gradients.as_they_are()
        self._take_step()

    @contextmanager
    def _left_at_no_exception(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.left = True
            self._gradients.as_they_are()
            raise

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Gradients so far are added after it, as schedules scale whatever there is.

        Raises:
            ConfigError: a stage was given none.
        """
        with self._gradients.set_aside(), self._left_at_no_exception():
            with pipeline_scales.once() if self._piped else nullcontext():
                yield
            self._ran = self._gradients.given
            if self._piped and not self._ran:
                raise _not_given()


def _not_given() -> ConfigError:
    return ConfigError(
        "no parameter of this stage was given a gradient within ctx.backward(), so its "
        "samples would have counted as if their gradients were zero. The step was not "
        "taken; the run ends. Run one schedule in each ctx.backward(), zero gradients "
        "after it, and let exceptions of the schedule through."
    )
