"""A gate: configurations that cannot fit are refused before they run, by an estimate of a step.

What the estimate lacks (what libraries hold beside) is learned from the trials that ran.

Not here: what becomes of a refused trial (trial_endings), or counting a step (cost.trace).
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.filesize import decimal

from elastix.arguments import checked, require
from elastix.errors import ConfigError
from elastix.search.executors.packer import Experience
from elastix.search.trial import Config, Trial

if TYPE_CHECKING:
    import torch

    from elastix.cost.devices import Device
    from elastix.cost.trace import Cost

logger = logging.getLogger(__name__)
_MIDDLE = 0.5  # half of the trials take more than is expected


@dataclass(frozen=True)
class Foreseen:
    """What is expected of a configuration.

    Attributes:
        predicted_bytes: what a step takes by the estimate; 0: it could not be made.
        refusal: why it is not to run; empty if it may.
    """

    predicted_bytes: int = 0
    refusal: str = ""


@checked
class Gate:
    """Refuses what would take too much.

    A step is traced on tensors without memory (`elastix estimate` does the same), which costs 0.1
    to 0.5 s of CPU a configuration in the campaign's process: worth it where a trial takes longer.
    Recurrent layers other than LSTM are traced step by step, which costs far more. A configuration
    that cannot be traced may run, and the first one of these is warned of.

    The limit of memory is compared with what the estimate has meant in real workers: a line through
    the latest trials, added to the least that a worker holds before it begins one. So about as many
    are wrongly refused as are wrongly let in. Until there are such trials, the estimate itself,
    which is too low, takes the place of that line.

    Args:
        build: the model of a configuration, as the train function makes it.
        inputs: the batch of one worker for a configuration, as a tuple of tensors: a step calls
            `model(*inputs(config))`.
        memory: the most bytes that a worker may hold, libraries included; or those of a GPU.
        seconds: the most that a step may take by its roofline on the device, which is less than it
            really takes.
        parameters: the most that a model may have.
        loss: makes one number, a tensor, of the model's outputs. None: their mean square.
        optimizer: adamw, adam or sgd.
        device: of which `seconds` are; one that `elastix estimate` knows, or "here", this CPU.

    Raises:
        ConfigError: no limit, or one that is no number above 0; no such device.
    """

    def __init__(
        self,
        build: Callable[[Config], "torch.nn.Module"],
        inputs: Callable[[Config], Sequence["torch.Tensor"]],
        *,
        memory: float | None = None,
        seconds: float | None = None,
        parameters: float | None = None,
        loss: "Callable[[object], torch.Tensor] | None" = None,
        optimizer: str = "adamw",
        device: str = "here",
    ) -> None:
        limits = [limit for limit in (memory, seconds, parameters) if limit is not None]
        numbers = all(n > 0 for n in limits)
        require(
            callable(build) and callable(inputs) and bool(limits) and numbers,
            f"Gate(memory={memory!r}, seconds={seconds!r}, parameters={parameters!r}): build and "
            "inputs are functions of a configuration, and at least one limit is given, a number "
            "above 0. Nothing was started.",
        )
        require(
            loss is None or callable(loss),
            f"Gate(loss={loss!r}): it must be a function of the model's output. Nothing was "
            "started.",
        )
        from elastix.cost.devices import DEVICES
        from elastix.cost.trace import OPTIMIZERS

        require(
            device in ("here", *DEVICES) and optimizer in OPTIMIZERS,
            f"Gate(device={device!r}, optimizer={optimizer!r}): the device is here or one of "
            f"{', '.join(DEVICES)}, the optimizer one of {', '.join(OPTIMIZERS)}. Nothing was "
            "started.",
        )
        self._build, self._inputs, self._loss = build, inputs, loss
        self._memory, self._seconds, self._parameters = memory, seconds, parameters
        self._optimizer, self._device_name = optimizer, device
        self._device: Device | None = None
        self._experience = Experience()
        self._base = 0
        self._on_cpu = False
        self._told = False  # that there are configurations without an estimate

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another with the same functions, which may be methods of an object that has no copy."""
        made = copy(self)
        made._experience = deepcopy(self._experience, memo)
        return made

    def check(self, config: Config) -> None:
        """That an estimate can be made of this one.

        Raises:
            ConfigError: it cannot; says why.
        """
        self._cost(config)

    def begin(self, idle: int) -> None:
        """Take in what a worker holds before it runs anything; 0: unknown, or it is on a GPU.

        Raises:
            ConfigError: that is more than the gate allows.
        """
        self._base = _least(self._base, idle)
        self._on_cpu = idle > 0
        if self._memory is not None and self._base >= self._memory:
            raise ConfigError(
                f"the gate allows a worker {decimal(round(self._memory))}, and one that runs "
                f"nothing holds {decimal(self._base)} with its libraries: no configuration fits. "
                "No trial was run. Give Gate(memory=...) what a worker may hold in all."
            )

    def foresee(self, config: Config) -> Foreseen:
        """Estimate a configuration, and say whether it may run."""
        try:
            cost = self._cost(config)
        except Exception as error:  # noqa: BLE001 - the user's code: if it is wrong the trial says so
            if not self._told:
                logger.warning("%s It runs all the same, as do others of which that is so.", error)
            self._told = True
            return Foreseen()
        return Foreseen(self._predicted(cost), self._refusal(cost))

    def learn(self, trial: Trial) -> None:
        """What a trial took that was let in, beyond the least that a worker was seen to hold.

        If what trials leave in a worker counted as held, all others would be refused in the end,
        and with none let in there would be nothing more to learn.
        """
        self._base = _least(self._base, trial.base_bytes)
        self._experience.learn(
            predicted=trial.predicted_bytes,
            base=trial.base_bytes,
            peak=trial.peak_bytes,
            idle=self._base,
        )

    def expected_bytes(self, predicted: int) -> int:
        """What a worker will hold, by the estimate of a step and what was learned."""
        learned = self._experience.expect(predicted, _MIDDLE)
        return self._base + (predicted if learned is None else learned)

    def _refusal(self, cost: "Cost") -> str:
        if self._parameters is not None and cost.parameters > self._parameters:
            return f"{cost.parameters:,} parameters, the gate allows {self._parameters:,.0f}"
        expected = self.expected_bytes(self._predicted(cost))
        if self._memory is not None and expected > self._memory:
            allowed = decimal(round(self._memory))
            return f"it would hold about {decimal(expected)}, the gate allows {allowed}"
        if self._seconds is not None and (step_s := self._step_s(cost)) > self._seconds:
            return f"a step takes {step_s:.3g} s at least, the gate allows {self._seconds:g} s"
        return ""

    def _predicted(self, cost: "Cost") -> int:
        """Bytes of a step: on a CPU those that malloc cannot use again count."""
        return cost.peak_bytes + (cost.holes_bytes if self._on_cpu else 0)

    def _step_s(self, cost: "Cost") -> float:
        from elastix.cost.devices import DEVICES, this_machine

        if self._device is None:
            here = self._device_name == "here"
            self._device = this_machine() if here else DEVICES[self._device_name]
        return cost.roofline_s(self._device.peak("float32"), self._device.bytes_per_s)

    def _cost(self, config: Config) -> "Cost":
        from elastix.cost.trace import trace

        try:
            return trace(
                lambda: self._build(deepcopy(config)),  # a trial is to have all of it
                lambda: self._inputs(deepcopy(config)),
                loss=self._loss,
                optimizer=self._optimizer,
                foreach=self._device_name != "here",
            )
        except ConfigError as error:
            raise ConfigError(f"the gate cannot estimate {dict(config)}: {error}") from error


def _least(held: int, also: int) -> int:
    """The lesser of two; 0: unknown."""
    return min(held or also, also or held)
