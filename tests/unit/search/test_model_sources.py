"""What trials take from a store and leave there, on a worker that runs one after the other."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, cast

import torch

from elastix.search.model_sources import InheritTerms, TrialModelSource
from elastix.search.trial import Objectives
from elastix.state import State
from elastix.store import Store
from elastix.store.ledger import Ledger
from elastix.store.server import _Client, _Server
from elastix.train.replica.model_source import TrainedModel


@dataclass(frozen=True)
class Served:
    """A store whose index another process owns."""

    path: str
    servers: ClassVar[dict[str, _Server]] = {}

    def open(self) -> Store:
        server = self.servers.setdefault(self.path, _Server(self.path, None, None))
        return Store(self.path, ledger=cast(Ledger, _Client(server.call)))


def test_a_worker_writes_all_its_trials_models_to_one_pack(tmp_path: Path) -> None:
    terms = InheritTerms(
        store=Served(str(tmp_path)),
        campaign="c",
        objectives=Objectives.of("score"),
        mode="lcs",
        provider="store",
    )
    for number in range(4):
        model = torch.nn.Linear(3, 2)
        source = TrialModelSource(replace(terms, store=Served(str(tmp_path))), number, {})
        source.inherit(model)
        state = State(dict(model.state_dict()))
        source.leave(TrainedModel(model, state, {"score": float(number)}, 1.0, "final"))
    assert len(list((tmp_path / "packs").iterdir())) == 1
    assert len(list((tmp_path / "writers").iterdir())) == 1, "a file that stays open"
