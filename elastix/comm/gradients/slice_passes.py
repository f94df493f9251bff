"""The backward passes of a step whose batch is cut into slices. Counts them, and no more.

A slice may have several passes, and its gradients are complete after the last. How many there are
is learned from the first slice. From then on those of a worker's last slice are sent to the others
while they are computed; before, they are sent when the next slice is asked for.
"""

from elastix.errors import ConfigError

LOOP = "for step in epoch: for x, y in step: loss(model(x), y).backward()"


class SlicePasses:
    """See the module.

    Attributes:
        open: such a step has begun, and is not over.
        fresh: none of its passes has begun.
        suspended: it was to be reduced, and slices of a lost worker are to be computed first.
        usual: how many passes a slice has; None before the first.
    """

    def __init__(self) -> None:
        self.open = False
        self.fresh = False
        self.suspended = False
        self.usual: int | None = None
        self._within = False  # a slice is in hand
        self._last = False  # it is the last that this worker knows of
        self._passes = 0  # it has had

    @property
    def launching(self) -> bool:
        """Whether the pass that runs, or comes next, completes this worker's gradients."""
        return self._last and self._passes + 1 == self.usual

    def begin_slice(self, last: bool) -> None:
        """A slice is handed to the train function."""
        self._within, self._last, self._passes = True, last, 0

    def begin_pass(self) -> None:
        """A backward pass brings its first gradient.

        Raises:
            ConfigError: it is one too many, or about no slice.
        """
        if not self._within:
            raise ConfigError(
                "a backward pass was run beside the loop over a step's slices, before that has "
                "ended. The step was not taken; the run ends. Write one loop within the other: "
                f"{LOOP}"
            )
        if self.usual is not None and self._passes >= self.usual:
            raise self._uneven(self._passes + 1)

    def end_pass(self) -> None:
        """It is over."""
        self._passes += 1

    def end_slice(self) -> None:
        """The train function asks for what comes after it.

        Raises:
            ConfigError: it had no pass, or fewer than the slices before.
        """
        self._within = self._last = False
        if not self._passes:
            raise ConfigError(
                "a slice was drawn, and then the next one, without a backward pass between them. A "
                "loader with slices yields one step after the other, and a step its slices: "
                f"{LOOP}. The step was not taken; the run ends. If there is nothing to learn from "
                "a slice, call backward on a loss that is zero."
            )
        if self.usual is not None and self._passes != self.usual:
            raise self._uneven(self._passes)
        self.usual = self._passes

    def _uneven(self, passes: int) -> ConfigError:
        return ConfigError(
            f"a slice had {passes} backward passes, and those before it {self.usual}. The step "
            "was not taken; the run ends. Run as many for each slice: of those that have nothing "
            "to add, on a loss that is zero."
        )
