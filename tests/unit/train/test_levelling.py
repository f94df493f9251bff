"""Whose State all go on from, where processors differ; and what becomes of it."""

import pytest
import torch

from elastix.comm.network import transfer
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.comm.protocol.operation import OperationOutcome
from elastix.state import State
from elastix.train.replica.levelling import Levelling, source_of


class Network:
    """A group in which the root's bytes are kept for the others, who come after it."""

    def __init__(self, members):
        self.members, self.sent, self.asked = members, [], 0

    def broadcast(self, tensor, root):
        del root
        if self.asked == len(self.sent):
            self.sent.append(tensor.clone())
        tensor.copy_(self.sent[self.asked])
        self.asked += 1


@pytest.mark.parametrize(
    ("processors", "source"),
    [
        ({4: 1}, 4),
        ({4: 1, 5: 2}, 4),
        ({4: 1, 5: 2, 6: 2}, 5),
        ({4: 1, 5: 2, 6: 2, 7: 1}, 4),
    ],
)
def test_it_is_the_first_whose_kind_most_have(processors, source):
    assert source_of(processors) == source


def levelling(worker, value, adopted):
    tensors = {"w": torch.full((3,), float(value)), "@rng/cpu": torch.full((2,), float(worker))}
    state = State(tensors, {"step": 4, "@optimizer": {}})
    device = torch.device("cpu")
    return Levelling(worker, state, adopted.append, lambda: {1: 5, 2: 6, 3: 6}, device)


@pytest.mark.parametrize("most", [transfer._CHUNK_BYTES, 5])
def test_all_but_the_source_take_its_tensors_over_and_no_random_numbers(most, monkeypatch):
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", most)
    group, adopted = Network((1, 2, 3)), {worker: [] for worker in (1, 2, 3, 9)}
    works = {worker: levelling(worker, 10 * worker, adopted[worker]) for worker in (2, 1, 3)}
    for work in works.values():
        group.asked = 0
        assert len(list(work.launch(group))) == -(-12 // most)
    assert max(sent.nbytes for sent in group.sent) <= most
    results = {int(work.payload(group)[0]) for work in works.values()}
    assert results == {2}
    assert len({work.detail() for work in works.values()}) == 1
    outcome = OperationOutcome(torch.tensor([2]), 1, 1)
    for work in works.values():
        assert work.accept(outcome) is None
    assert not adopted[2]
    for worker in (1, 3):
        (state,) = adopted[worker]
        assert state.tensors.keys() == {"w"}
        assert state.tensors["w"].tolist() == [20.0] * 3
    onlooker = levelling(9, 0, adopted[9])
    onlooker.imitate(Watched(3, 11, (), (), 1, 1, outcome.result, tuple(works[1].parts())))
    assert adopted[9][0].tensors["w"].tolist() == [20.0] * 3
