"""A worker's own gradients in `param.grad`, from the first pass of a step until it is reduced.

Most steps have one pass, and nothing to keep. Where several add up, their gradients must stay as
autograd left them: each worker has those of its own samples, so whatever the train function does to
them it does to something else everywhere. Changes are found and refused here.

Passes may be about batches that are split over the workers in different ratios. Their gradients are
kept apart (GradientBucket.turn_to) until buckets are filled, each with the scale of its ratio.

Not here: what a bucket notes of one gradient (gradient_bucket), and when a step is taken
(accumulation, reducer).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.steps import Steps
from elastix.errors import ConfigError


class LocalGradients:
    """See the module.

    Args:
        buckets: of all gradients.
        steps: hear of gradients of the step before that are added to.
        piped: see Accumulation.

    Attributes:
        ratio: of the passes of now, as a place among the scales of the step's weights.
        apart: hooks that keep those of several ratios apart; none in most steps.
        aside: passes run whose gradients are added to those so far when they are over.
        set_out: at a boundary, and there was no gradient since.
    """

    def __init__(self, buckets: Sequence[GradientBucket], steps: Steps, *, piped: bool) -> None:
        self.ratio = 0
        self.apart: list[RemovableHandle] = []
        self.aside = self.set_out = False
        self._buckets = buckets
        self._steps = steps
        self._piped = piped

    @property
    def given(self) -> bool:
        """Whether there is a gradient, or no parameter is trained."""
        every = (p for bucket in self._buckets for p in bucket.parameters if p.requires_grad)
        gradients = [parameter.grad for parameter in every]
        return not gradients or any(gradient is not None for gradient in gradients)

    @property
    def not_zero(self) -> list[torch.nn.Parameter]:
        """Those that have a gradient which is not zero."""
        return [parameter for bucket in self._buckets for parameter in bucket.not_zero()]

    def over(self) -> None:
        """The step is: further passes are of the first ratio of the next one."""
        for hook in self.apart:
            hook.remove()
        self.apart = []
        self.ratio = 0

    def forget(self) -> None:
        """What was added up counts no more."""
        for bucket in self._buckets:
            bucket.forget_parts()

    def as_they_are(self) -> None:
        """Whoever has changed them since was meant to."""
        for bucket in self._buckets:
            bucket.forget_notes()

    # ------------------------------------------------------------------------ kept apart

    def turn_to(self, ratio: int) -> None:
        """Gradients of another ratio come next."""
        for bucket in self._buckets:
            bucket.keep_apart(self.ratio)
        self._tell_apart()
        self.ratio = ratio

    def _tell_apart(self) -> None:
        """From now on be called before a gradient is added to one that may have another ratio."""
        if self.apart or self._piped:  # whose schedules give gradients by themselves
            return
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                if parameter.requires_grad:
                    hook = self._turning_hook(bucket, place)
                    self.apart.append(parameter.register_hook(hook))

    def _turning_hook(self, bucket: GradientBucket, place: int) -> Callable[[torch.Tensor], None]:
        def turn(_gradient: torch.Tensor) -> None:
            if not self.aside:
                bucket.turn_to(place, self.ratio)

        return turn

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it there are none but those of its passes; those so far are added after it.

        Left by an exception, they are not.
        """
        for bucket in self._buckets:
            bucket.set_aside()
        before, self.aside = self.aside, True
        yield
        self.aside = before
        for bucket in self._buckets:
            bucket.put_together(self.ratio)
            bucket.added_anywhere()

    # ------------------------------------------------------------------------ unchanged

    def look_for_left(self, bucket: GradientBucket, place: int) -> None:
        """Autograd has just added to this one: perhaps to what the step before has left there."""
        if self.set_out:
            self.set_out = False
            for other in self._buckets:
                other.look_for_left(place if other is bucket else None)
        if not bucket.adds_to_left(place):
            return
        # What is left of this one cannot be told from what was added: see what the others have.
        if any(other.still_left(place if other is bucket else None) for other in self._buckets):
            self._steps.carried([bucket.parameters[place]])
        for other in self._buckets:
            other.forget_left()

    def look_if_changed(self, bucket: GradientBucket | None = None, place: int = -1) -> None:
        """That nobody has changed what was added up so far.

        Args:
            bucket: to one of whose gradients autograd has just added; None for none.
            place: that one.

        Raises:
            ConfigError: somebody has.
        """
        if any(other.changed(place if other is bucket else None) for other in self._buckets):
            raise ConfigError(
                "gradients were changed within a step that is added up by ctx.accumulate(), by "
                "clipping, say. There each worker has those of its own samples, so all would have "
                "changed others. The step was not taken; the run ends. Do it after the last "
                "backward pass, which is outside of ctx.accumulate(); with Accelerate within `if "
                "accelerator.sync_gradients:`."
            )

    def look_if_meddled(self) -> None:
        """The same of a step in slices, whose gradients nobody drops either.

        Raises:
            ConfigError: somebody has.
        """
        if any(bucket.meddled for bucket in self._buckets):
            raise ConfigError(
                "gradients were changed or dropped within the loop over a step's slices, by "
                "zero_grad, say, by clipping, or by a hook that was registered on them. There "
                "they are sums of what this worker has computed so far, and no step's. The step "
                "was not taken; the run ends. Do it after that loop, before or after "
                "optimizer.step()."
            )
