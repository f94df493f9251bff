"""A worker's process among the others of its crew: their world, its mesh, the lines between them.

Not here: what is said on the lines (comm.protocol.crew), how a world is made and cut (crew_world).
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from blake3 import blake3

from elastix import mesh_check
from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.weighted_reduce_scatter import waiting, weigh
from elastix.comm.network.crew_line import FollowersLine, SpeakersLines
from elastix.comm.network.crew_world import DeviceMesh, Inside
from elastix.comm.network.process_group import Wiring
from elastix.comm.protocol.standing import STILL_S
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.data.source import Source
from elastix.errors import TrainError
from elastix.state import BY_PARAMETER, Stateful, parameter_names
from elastix.train.replica import refusals, stage_norms

SHARD = "shard"
"""The axis that splits a worker's samples."""

_ROUNDING = 1e-5
"""Relative; places may have added up squares in other orders."""

PIPE = "pipe"
"""The axis that splits its layers into stages."""


class Mates:
    """See the module.

    Attributes:
        place: of this process in the mesh; that at 0 speaks for the worker.
        within: this place's part of the worker's share of the last batch.
        whole: names of all parameters of a model in stages.
        parted: why the processes of this worker wait for each other for ever; None if they do not,
            as far as is known. The speaker finds out.
    """

    def __init__(
        self,
        driver: GroupDriver,
        wiring: Wiring,
        axes: Mapping[str, int],
        inbox: ThreadSafeInbox,
    ) -> None:
        self.place, self.within = wiring.place, 1.0
        self.whole: frozenset[str] = frozenset()
        self._driver, self._wiring, self._inbox = driver, wiring, inbox
        self._inside = Inside(wiring, axes)
        self._modules: list[torch.nn.Module] = []
        self._lines: SpeakersLines | FollowersLine | None = None
        self.parted: TrainError | None = None

    def assemble(self) -> None:
        """Block until all processes of the worker are connected.

        Raises:
            OSError, RuntimeError: one of them is lost.
        """
        driver, secret, place = self._driver, self._wiring.secret, self.place
        ends = self._inbox.notify, self.cut
        tells = ""
        if not place:
            lines = SpeakersLines(self._wiring.interface, secret, driver.crew, *ends)
            self._lines, tells = lines, json.dumps(lines.address)
        if self._inside.silent:
            driver.doubt_within(lambda wait: self._inside.check(wait=wait))
        told = self._inside.open(tells)
        if driver.follower is not None:
            host, port = json.loads(told[0])
            self._lines = FollowersLine((host, port), secret, place, driver.follower, *ends)
        if self._lines is not None:
            driver.say_by(self._lines.say)
        staged = self.stages > 1
        driver.watch.begin(self._inside.begun, self._inside.carried if staged else None)

    @property
    def mesh(self) -> DeviceMesh:
        """The worker's."""
        mesh = self._inside.mesh
        assert mesh is not None  # noqa: S101 - asked for after `assemble`
        return mesh

    @property
    def part(self) -> tuple[int, int]:
        """This place's index among those that split the worker's samples, and their number."""
        return self._along(SHARD)

    @property
    def stages(self) -> int:
        """Into how many the worker's layers are split; 1 if they are not."""
        return self._along(PIPE)[1]

    @property
    def piped(self) -> bool:
        """Whether steps are taken by ctx.backward(), be it with a single stage."""
        return PIPE in (self.mesh.mesh_dim_names or ())

    @property
    def stream(self) -> tuple[int, int]:
        """Which random numbers this place draws, and of how many streams; along tensor the same."""
        (part, parts), (stage, stages) = self.part, self._along(PIPE)
        return stage * parts + part, stages * parts

    @property
    def last_stage(self) -> bool | None:
        """Whether this place has the last layers; None if each has all of them."""
        stage, stages = self._along(PIPE)
        return stage + 1 == stages if stages > 1 else None

    def _along(self, axis: str) -> tuple[int, int]:
        if axis not in (self.mesh.mesh_dim_names or ()):
            return 0, 1
        return self.mesh.get_local_rank(axis), self.mesh[axis].size()

    def settle(
        self,
        modules: Mapping[str, torch.nn.Module],
        others: Mapping[str, Stateful],
    ) -> None:
        """The model is sharded: gradients within the worker go by its places' samples.

        Args:
            modules: prefix to module, as for state.capture.
            others: name to whatever else was prepared.

        Raises:
            ConfigError: something of the model would part the places, or torch will refuse it.
        """
        self._inside.settle()
        self.within = 1 / self.part[1]  # until a batch is drawn, and where none ever is
        mesh_check.check(modules, self.mesh)
        scales = any(
            isinstance(other, torch.amp.GradScaler) and other.is_enabled()
            for other in others.values()
        )
        for other in others.values():
            if isinstance(other, torch.optim.Optimizer):
                mesh_check.check_optimizer(other)
                if scales:
                    mesh_check.check_scaling(other)
        if self.stages > 1:
            self._check_stages(modules, others)
            stage_norms.watch(self._check_norms)
        for module in modules.values():
            mesh_check.take_sums(module)
        self._modules = list(modules.values())
        if self.part[1] > 1:
            weigh(self._modules, lambda: self.within)

    def _check_stages(
        self, modules: Mapping[str, torch.nn.Module], others: Mapping[str, Stateful]
    ) -> None:
        """Refuse stages that are not one model, and what needs all of them at once. Collective."""
        mesh_check.check_stages(modules)
        trained = mesh_check.trained_names(modules)
        names = list(parameter_names(modules).values())
        said = json.dumps([self._along(PIPE)[0], trained, names, _make_up(others)])
        told = [json.loads(text) for text in self._inside.tell("stages", said)]
        self.whole = frozenset(name for _, _, names, _ in told for name in names)
        mesh_check.check_layers((stage, names) for stage, names, *_ in told)
        kinds = [kinds for *_, kinds in told]
        for kind in kinds[1:]:
            if kind != kinds[0]:
                raise refusals.stages_parted(f"{kinds[0]} at one and {kind} at another")
        for other in others.values():
            scales = isinstance(other, torch.amp.GradScaler) and other.is_enabled()
            if isinstance(other, torch.optim.LBFGS) or scales:
                raise refusals.not_by_stages(type(other).__name__)

    @property
    def waits(self) -> bool:
        """Whether gradients are still to be weighed, as parts of the worker's samples are now."""
        return waiting(self._modules)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of numbers that each place has of its own samples, by these. Collective in the worker.

        In a pipeline those count that the last stage has: it knows the loss.

        Raises:
            ConfigError: other places give other names.
        """
        values = dict(sorted(values.items()))  # other places may have them in another order
        if self._alike:
            return values
        self._look_at_names(values)
        stage, stages = self._along(PIPE)
        counts = self.within and stage + 1 == stages
        mine = [v * self.within if counts else 0.0 for v in values.values()]
        sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self.add_up(sums)
        if stages > 1:
            self._inside.add_up(sums, PIPE)
        return dict(zip(values, sums.tolist(), strict=True))

    def averaged(self, values: Mapping[str, float]) -> None:
        """The round of speakers is over. Looks at the names where `mean` has not.

        Where places have the same samples, `mean` adds up nothing and can leave that for now: the
        round comes first, in which a place that is in another call is told which one it is.

        Raises:
            ConfigError: other places have given other names.
        """
        if self._alike:
            self._look_at_names(values)

    @property
    def _alike(self) -> bool:
        """Whether all places have the same samples and layers, so that one can speak for all."""
        return self.part[1] < 2 and self.stages < 2

    def _look_at_names(self, values: Mapping[str, float]) -> None:
        if not self.agree_on(repr(sorted(values))):
            raise refusals.parted_in_mean()

    def agree(self, *numbers: int) -> bool:
        """Whether all places have called it with the same ones. Collective in the worker."""
        told = self._inside.gather(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        return all(torch.equal(told[0], other) for other in told)

    def agree_on(self, said: str) -> bool:
        """The same for text."""
        return self.agree(int.from_bytes(blake3(said.encode()).digest(8)) >> 2)

    def add_up(self, sums: torch.Tensor) -> None:
        """In place, over the places that split the worker's samples. Collective in the worker."""
        if self.part[1] > 1:
            self._inside.add_up(sums, SHARD)

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale gradients by the norm of all that the places have. Collective in the worker."""

        def add_up(squares: torch.Tensor) -> None:
            told, given = self._told(squares.item(), max_norm)
            if len(set(given)) > 1:
                raise refusals.clipped_otherwise("ctx.clip_grad_norm_", "max_norm", given)
            squares.fill_(sum(told))

        return stage_norms.clip(parameters, max_norm, self.mesh.size() // self.stages, add_up)

    def _told(self, *numbers: float) -> list[tuple[float, ...]]:
        """Of each number what every place has of it, by place. Collective in the worker."""
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return list(zip(*(one.tolist() for one in self._inside.gather(mine)), strict=True))

    def _check_norms(self, max_norm: float, norm: float) -> None:
        """Torch's clip_grads_with_norm_ is called with these. Collective in the worker."""
        given = self._told(max_norm, norm)
        for what, numbers in zip(("max_norm", "total_norm"), given, strict=True):
            apart = max(numbers) - min(numbers)
            if apart > _ROUNDING * max(numbers):
                raise refusals.clipped_otherwise(
                    "torch.nn.utils.clip_grads_with_norm_", what, numbers
                )

    def add_up_stages(self, sums: torch.Tensor) -> None:
        """In place, over the places that split the worker's layers. Collective in the worker."""
        self._inside.add_up(sums, PIPE)

    def tell(self, said: str) -> list[str]:
        """What each place has said, by place. Collective in the worker."""
        mine = torch.tensor(list(said.encode()), dtype=torch.uint8, device="cpu")
        sizes = [int(size) for size in self._inside.gather(torch.tensor([len(mine)], device="cpu"))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = mine
        told = zip(self._inside.gather(padded), sizes, strict=True)
        return [bytes(text[:size].tolist()).decode() for text, size in told]

    def look(self) -> None:
        """See where this process stands, and whether others do elsewhere. Now and then; a thread.

        If they wait for each other, the training thread comes out of what it is in.
        """
        driver, stands = self._driver, self._driver.watch.look(time.monotonic())
        if self.place:
            if self._lines is not None and stands is not None and stands.still_s >= STILL_S:
                self._lines.say(stands)
            return
        self.parted = self.parted or driver.crew.parted(self._wiring.me, stands)
        if self.parted is not None:
            self.cut()
            self._inbox.notify()

    def share_out(self, source: Source) -> Source:
        """What this place reads of a loader's batches. Collective in the worker.

        Raises:
            ConfigError: it is not built for crews, or other places draw otherwise.
        """
        if source.memory is not None:
            raise refusals.not_in_crew("ctx.loader(rehearse=...)")
        if self.stages > 1 and source.microbatch is None:
            raise refusals.needs_microbatch()
        mine = replace(source, part=self.part)
        if not self.agree_on(repr(mine.draws)):
            raise refusals.parted_loaders()
        return mine

    def cut(self) -> None:
        """A process of the worker is lost: come out of what waits for it. Any thread."""
        self._driver.break_up()
        self._inside.cut()

    def come_out(self) -> None:
        """Of a worker that is lost; block until nothing of it writes to memory any more."""
        self._inside.come_out()

    def close(self) -> None:
        """Leave this worker."""
        if self._lines is not None:
            self._lines.close()
        self._inside.close()


def _make_up(others: Mapping[str, Stateful]) -> dict[str, list[str]]:
    """By name, what must be alike at all stages: of optimizers the options of their groups."""
    found: dict[str, list[str]] = {}
    for name, other in others.items():
        groups = other.param_groups if isinstance(other, torch.optim.Optimizer) else []
        options = [{k: v for k, v in g.items() if k not in BY_PARAMETER} for g in groups]
        found[name] = [type(other).__name__, *map(repr, options)]
    return found
