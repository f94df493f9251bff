"""The controller, without Ray."""

import queue
import threading
from types import SimpleNamespace

from elastix.train.on_ray.controller import Controller


def test_a_question_to_the_store_waits_until_that_is_open():
    """Ray lets workers call a controller that it has restarted before that has looked at anything.

    One that is told of an AttributeError cannot know that it may ask again.
    """
    controller = Controller.__new__(Controller)
    controller._opened = threading.Event()
    answers = queue.Queue()
    ask = threading.Thread(target=lambda: answers.put(controller.call("places", ())), daemon=True)
    ask.start()
    ask.join(0.2)
    assert ask.is_alive()
    ledger = SimpleNamespace(places=lambda digests: {"asked": digests})
    controller._checkpoints = SimpleNamespace(store=SimpleNamespace(ledger=ledger))
    controller._opened.set()
    assert answers.get(timeout=20) == {"asked": ()}
