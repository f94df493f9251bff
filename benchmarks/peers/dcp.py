"""torch.save and torch's distributed checkpoint (DCP), as their users save a State.

DCP in the background: the staging is asynchronous too, into memory that is kept (DefaultStager),
so the training thread waits only for what is not copied before the optimizer's step.
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

_TIMEOUT = timedelta(seconds=30)
Tensors = dict[str, torch.Tensor]


@contextmanager
def alone() -> Iterator[None]:
    """A gloo group of one process, which DCP's background save asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Folder:
    """A new place for each save; the one before is removed when the new one is durable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def next(self) -> Path:
        self._number += 1
        place = self._folder / str(self._number)
        place.mkdir(parents=True)
        return place

    def drop_last(self) -> None:
        if self._number > 1:
            shutil.rmtree(self._folder / str(self._number - 1))


class TorchSave:
    """torch.save, flush, fsync."""

    def __init__(self, folder: Path) -> None:
        self._places = _Folder(folder)

    def begin(self, tensors: Tensors) -> None:
        """The whole save."""
        with (self._places.next() / "state.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def copied(self) -> None:
        """Nothing is copied."""

    def durable(self) -> None:
        """It is; the one before is removed."""
        self._places.drop_last()

    def close(self) -> None:
        """Nothing is open."""


class DcpSave(TorchSave):
    """dcp.save, which syncs its files by default."""

    def begin(self, tensors: Tensors) -> None:
        """The whole save."""
        dcp_save(dict(tensors), checkpoint_id=self._places.next())


class DcpAsync:
    """dcp.async_save with asynchronous staging and a stager that is kept."""

    def __init__(self, folder: Path) -> None:
        self._places = _Folder(folder)
        self._stager = stager()
        self._saving: Any = None

    def begin(self, tensors: Tensors) -> None:
        """At the boundary."""
        place = self._places.next()
        self._saving = async_save(dict(tensors), checkpoint_id=place, async_stager=self._stager)

    def copied(self) -> None:
        """Before the optimizer's step."""
        _staging(self._saving).result()

    def durable(self) -> None:
        """Until it is stored; the one before is removed."""
        _upload(self._saving).result()
        self._places.drop_last()

    def close(self) -> None:
        """Let go of the stager."""
        self._stager.close()


class KeptStager(DefaultStager):
    """One that keeps its memory from save to save, as it is meant to.

    That of torch 2.11 closes what it keeps after each staging, and cannot stage again.
    """

    def __init__(self, config: StagingOptions) -> None:
        super().__init__(config)
        self._state_dict_stager.close = _nothing  # type: ignore[method-assign]

    def close(self) -> None:
        """See DefaultStager."""
        del self._state_dict_stager.close
        super().close()


def _nothing() -> None:
    """It is closed at the end."""


def stager() -> DefaultStager:
    """Asynchronous; into pinned memory if there is a GPU."""
    cuda = torch.cuda.is_available()
    return KeptStager(
        StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=cuda,
        )
    )


def _staging(saving: Any) -> Future[Any]:  # noqa: ANN401 - AsyncSaveResponse
    future: Future[Any] = saving.staging_completion
    return future


def _upload(saving: Any) -> Future[Any]:  # noqa: ANN401 - AsyncSaveResponse
    future: Future[Any] = saving.upload_completion
    return future
