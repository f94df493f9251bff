"""The driver's view of a run: events as they come, through the death of the controller."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from elastix.errors import ControllerLost
from elastix.events import Event
from elastix.observe.console import Console
from elastix.train.on_ray.controller import Followed

_STOP_S = 10.0
_ASK_S = 1.0
_ANSWER_S = 30.0
_RESTART_S = 300.0


def follow(
    controller: Any,  # noqa: ANN401 - a handle
    console: Console,
    watch: Callable[[Sequence[Event]], None] | None = None,
) -> Followed:
    """Show events until the run is over, and hand them to `watch`. Blocks.

    Raises:
        ControllerLost: the controller was ended for good, or does not come back.
    """
    seen = 0
    away_since: float | None = None
    heard = False
    while True:
        try:
            news: Followed = ray.get(controller.follow.remote(seen, _ASK_S), timeout=_ANSWER_S)
        except ActorDiedError as error:
            raise ControllerLost(
                f"the controller of the run was ended for good: {error} The workers end by "
                "themselves. fit() again goes on from the last stored State."
            ) from error
        except (RayActorError, GetTimeoutError) as error:
            now = time.monotonic()
            if away_since is None:
                away_since = now
                if heard or isinstance(error, RayActorError):  # else it may be slow to start
                    console.leaderless()
            console.tick()
            if now - away_since > _RESTART_S:
                raise ControllerLost(
                    f"the controller died and did not come back within {_RESTART_S:.0f} s: "
                    f"{error} The workers end by themselves when it is ended. fit() again goes on "
                    "from the last stored State. Look at Ray's logs for why it cannot start."
                ) from error
            time.sleep(0.1)
            continue
        except RayError as error:
            raise ControllerLost(f"the controller cannot be asked: {error}") from error
        away_since, heard = None, True
        seen += len(news.events)
        for event in news.events:
            console.show(event)
        console.tick()
        if watch is not None:
            watch(news.events)
        if news.over:
            return news


def is_over(controller: Any) -> bool:  # noqa: ANN401 - a handle
    """Whether its run has ended, well or not; False also if it does not answer in time."""
    try:
        return bool(ray.get(controller.status.remote(), timeout=_ANSWER_S)["over"])
    except ActorDiedError:
        return True
    except (RayActorError, GetTimeoutError):
        return False  # Ray starts it anew


def stop(controller: Any, reason: str) -> None:  # noqa: ANN401 - a handle
    """Ask the controller to end the run, and give it a moment."""
    with contextlib.suppress(RayActorError, GetTimeoutError):
        ray.get(controller.stop.remote(reason), timeout=_STOP_S)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            if ray.get(controller.follow.remote(1 << 60, _ASK_S), timeout=_STOP_S).over:
                return
