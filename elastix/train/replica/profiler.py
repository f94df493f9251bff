"""Records one worker's timeline: a listener to its phases, and hooks of torch.

It exists only where a ProfileConfig was given, and takes its hooks away after the last step that
it is to record; a run without it does not know that there is such a thing.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from elastix.comm.gradients.reducer import Reducer
from elastix.config import ProfileConfig
from elastix.observe.timeline import Timeline
from elastix.train.replica.member import Member

FOLDER = "timeline"
"""In the run's directory."""

# What the training thread does from a phase on; None: nothing that has a name.
_SECTIONS: dict[str, str | None] = {
    "boundary": "data",
    "batch": None,
    "slice": None,
    "handed": None,
    "again": None,
    "computed": None,
    "wait": "wait to be let in",
    "filled": "wait for buckets",
    "left": None,
    "released": None,
    "snapshot": "snapshot",
    "evaluate": "evaluate",
    "enter": "build group",
    "meet": "meet",
    "give": "give State",
    "take": "take State",
    "pause": "too few workers",
}
_ENTERING = ("build group", "meet", "give State", "take State")


class Profiler:
    """Listens to one member. All but `_reduced` is called in the training thread.

    Args:
        config: what to record.
        directory: of the run.
        worker: id of this worker.
    """

    def __init__(self, config: ProfileConfig, directory: Path, worker: int) -> None:
        self._config = config
        self._path = directory / FOLDER / f"worker-{worker}.json"
        self._timeline = Timeline(self._path, worker, f"worker {worker}")
        self._window: tuple[int, int] | None = None
        self._section: tuple[str, float] | None = None
        self._step: tuple[int, float] | None = None
        self._launched: dict[int, float] = {}
        self._reductions: deque[tuple[int, float, float]] = deque()
        self._depth = 0
        self._hooks: list[RemovableHandle] = []
        self._torch: Any = None
        self._over = False

    def attach(self, member: Member) -> None:
        """Hear of its phases, and of reductions that end, in threads of the process group."""
        member.on_phase(self._phase)
        member.on_reduced(self._reduced)

    def close(self) -> None:
        """The train function is through."""
        if not self._over:
            self._end(time.time())

    def _phase(self, name: str, detail: int) -> None:
        """The training thread has got to a phase."""
        if self._over:
            return
        if name == "boundary":
            self._boundary(detail)
        if name == "bucket":
            if self._recording:
                self._launched[detail] = time.time()
            if self._section is not None and self._section[0] in _ENTERING:
                self._mark("reduce again")
        elif name == "round":
            if detail == Reducer.kind:
                self._mark("commit round")
        elif name in _SECTIONS:
            self._mark(_SECTIONS[name])

    # ------------------------------------------------------------------ the window

    def _boundary(self, step: int) -> None:
        """A step is over, `step` of them are committed; the next one may be in the window."""
        now = time.time()
        if self._window is None:
            self._window = self._config.window(step)
        start, stop = self._window
        if self._step is not None:
            number, since = self._step
            if step > number:
                self._timeline.span("steps", f"step {step}", since, now)
                self._step = None
        if step >= stop:
            self._end(now)
        elif step >= start and self._step is None:
            self._step = (step, now)
            self._begin()
        self._drain()
        if not self._over:
            self._timeline.flush()

    def _begin(self) -> None:
        if self._hooks:
            return
        self._hooks = [
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._mark("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._mark(None)),
        ]
        if self._config.torch:
            self._torch = torch.profiler.profile()
            self._torch.start()

    def _end(self, now: float) -> None:
        self._mark(None)
        if self._step is not None:
            self._timeline.span("steps", "unfinished step", self._step[1], now)
        self._over = True
        for hook in self._hooks:
            hook.remove()
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(str(self._path.with_suffix(".torch.json")))
            self._torch = None
        self._drain()
        self._timeline.close()

    @property
    def _recording(self) -> bool:
        """In the window; or on the way into the group, of which nobody knows yet where it leads."""
        return not self._over and (self._window is None or self._step is not None)

    # ------------------------------------------------------------------ marks

    def _mark(self, section: str | None) -> None:
        """What the training thread did is over, and `section` begins."""
        now = time.time()
        if self._section is not None:
            name, since = self._section
            self._timeline.span("training", name, since, now)
        self._section = (section, now) if section is not None and self._recording else None

    def _forward_begins(self, _module: torch.nn.Module, _inputs: Any) -> None:  # noqa: ANN401
        if self._depth == 0 and not self._evaluating:
            self._mark("forward")
        self._depth += 1

    def _forward_ends(self, _module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:  # noqa: ANN401
        self._depth -= 1
        if self._depth or self._evaluating:
            return
        self._mark("loss")
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._backward_begins())

    def _backward_begins(self) -> Callable[[torch.Tensor], None]:
        def begin(_gradient: torch.Tensor) -> None:
            if self._section is not None and self._section[0] == "loss":
                self._mark("backward")

        return begin

    @property
    def _evaluating(self) -> bool:
        return self._section is not None and self._section[0] == "evaluate"

    def _reduced(self, bucket: int) -> None:
        """A reduction has ended, well or not. In any thread."""
        launched = self._launched.pop(bucket, None)
        if launched is not None:
            self._reductions.append((bucket, launched, time.time()))

    def _drain(self) -> None:
        with suppress(IndexError):
            while True:
                bucket, start, stop = self._reductions.popleft()
                self._timeline.span(f"bucket {bucket}", "reduce", start, stop)
