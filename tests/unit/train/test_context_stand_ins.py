"""Whoever stands in for a Member behind a Context takes every call that the Context makes."""

import ast
import inspect

import pytest

from elastix.bench.ddp_rank import DdpReplica
from elastix.testing import exact_replay, replay
from elastix.train.replica import context

CALLS = {
    node.func.attr: node
    for node in ast.walk(ast.parse(inspect.getsource(context)))
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self._member.")
}
STAND_INS = [DdpReplica, replay._Replica, exact_replay._Replica]


def test_the_calls_are_found():
    assert {"prepare", "evaluate", "clip", "open_loader"} <= CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda one: one.__module__)
def test_it_takes_what_the_context_gives(stand_in, name):
    call = CALLS[name]
    named = {keyword.arg: None for keyword in call.keywords}
    inspect.signature(getattr(stand_in, name)).bind(None, *call.args, **named)
