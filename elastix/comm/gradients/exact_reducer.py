"""Gradient averaging whose result is the same to the last bit for any number of workers.

What the reducer does, for steps of slices alone. The gradients of each slice are taken away from
autograd and added up over the tree of slices (comm.slice_tree), and so are the changes of buffers.
With the last of a worker's slices buckets are reduced while its backward pass goes on.

Invariant: what was taken of a slice is never taken again. So after a loss the survivors add what
falls to them to what they have, and reduce it anew. A slice may be computed once more for nothing
but its digest (`begin_again`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from blake3 import blake3

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.bucket import Bucket
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.reducer import Reducer
from elastix.comm.gradients.slice_digests import SliceDigest, Sum
from elastix.comm.gradients.slice_sums import SliceSums
from elastix.comm.gradients.steps import Steps
from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group
from elastix.comm.network.tree_reduction import TreeReduction
from elastix.comm.slice_tree import Node
from elastix.errors import ConfigError
from elastix.state import raw_bytes


class ExactReducer(Reducer):
    """See the module, and Reducer."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        driver: GroupDriver,
        steps: Steps,
        *,
        may_void: bool,
        measured: bool = False,
        wire: torch.dtype | None = None,
        piped: bool = False,
    ) -> None:
        super().__init__(
            modules,
            driver,
            steps,
            may_void=may_void,
            measured=measured,
            wire=wire,
            piped=piped,
        )
        self._sums = [SliceSums(bucket) for bucket in self._buckets]
        self._under_way: list[TreeReduction] = []  # of the buckets that are launched, in order
        self._number = 0  # of the slice in hand
        self._again = False  # it is computed for its digest alone
        self._early = False  # that is to be of what its backward passes leave
        self._digest: SliceDigest | None = None  # of the slice in hand, if it is wanted

    def begin_slices(self) -> None:
        """See Reducer."""
        super().begin_slices()
        for buffers in self._buffers:
            buffers.count_from_now()
        self._under_way = []
        samples = self._steps.samples()
        present = [number for number, count in enumerate(samples) if count]
        even = len(set(samples)) == 1
        group = self._driver.group
        nodes = self._steps.sharing(group.members).nodes[group.rank] if group is not None else ()
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            if isinstance(bucket, GradientBucket):
                bucket.unscaled = even and bucket.counts_exactly
            unscaled = isinstance(bucket, GradientBucket) and bucket.unscaled
            sums.begin(present, len(samples), nodes, 1 / len(samples) if unscaled else 1.0)

    def begin_slice(self, number: int, ratio: int, last: bool) -> None:
        """See Reducer. Nothing of another slice is in gradients and buckets."""
        self._slices.begin_slice(last)
        self._number, self._local.ratio = number, ratio
        self._digest, self._again = None, False
        one_by_one = (
            self._slices.usual == 1
            and self._passes.nest is False
            and all(bucket.unscaled and bucket.comes_once for bucket in self._gradients)
            and self._sums[0].lacks(number)
            and not (self._piped or self._driver.watching)
        )
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            sums.begin_slice()
            if self._slices.suspended and bucket.pending is not None:
                bucket.pending.let_go()  # sums are going to change, which others may still read
            if isinstance(bucket, GradientBucket):
                bucket.collect = sums.add if one_by_one else None
            bucket.begin()

    def digest_slice(self) -> None:
        """After `begin_slice`: the digest of the slice in hand is wanted."""
        self._digest = SliceDigest()
        self._fill_whole()

    def _fill_whole(self) -> None:
        for gradients in self._gradients:
            gradients.collect = None
            gradients.begin()

    def begin_again(self, number: int, ratio: int, *, early: bool) -> None:
        """Further passes are about a slice that is computed for its digest alone.

        Args:
            number: of it.
            ratio: see `begin_slice`.
            early: the digest is of what its backward passes leave, and not of what is there when
                the train function asks for the next slice.
        """
        self.begin_slice(number, ratio, last=False)
        self._again, self._early = True, early
        self._fill_whole()

    @property
    def digest(self) -> tuple[int, int]:
        """Of the last slice, if it was wanted: of its gradients, and of its changes of buffers."""
        return self._digest.result if self._digest is not None else (0, 0)

    def sums(self) -> Mapping[Node, Sum]:
        """What this worker has added to the last gradient, until the next step begins."""
        norms: dict[Node, float] = {}
        digests: dict[Node, Any] = {}
        for bucket, sums in zip(self._buckets, self._sums, strict=True):
            for node, row in sums.rows:
                digests.setdefault(node, blake3()).update(raw_bytes(row).numpy().data)
                if isinstance(bucket, GradientBucket):
                    norm = torch.linalg.vector_norm(row[: bucket.elements].double())
                    norms[node] = math.hypot(norms.get(node, 0.0), sums.scale * float(norm))
        return {node: Sum(norms[node], found.digest()) for node, found in digests.items()}

    def _end(self) -> None:
        super()._end()
        if self._again and self._early:
            self._look_again()

    def _look_again(self) -> None:
        """Take the digest of what is in gradients and buffers now, and nothing else."""
        self._digest = SliceDigest()
        scales, samples = self._steps.weights(()).scales, self._steps.samples()[self._number]
        for bucket in self._buckets:
            bucket.begin()
            bucket.fill_missing(scales, self._local.ratio)
            bucket.close(samples)
            self._digest.add(bucket)

    def _keep_slice(self, counts: bool) -> None:
        """What it gave is taken, and put back to what the step began with."""
        if counts:
            scales = self._steps.weights(()).scales
            for bucket, sums in zip(self._buckets, self._sums, strict=True):
                if sums.lacks(self._number):
                    bucket.fill_missing(scales, self._local.ratio)
                    self._take(bucket, sums)
        elif self._again and not self._early:
            self._look_again()
        for buffers in self._buffers:
            buffers.end_slice(self._local.ratio, counts=False)
        self._streams.wait_for_current()
        for sums in self._sums:
            sums.own()
        for gradients in self._gradients:
            gradients.forget_slice()

    def _take(self, bucket: Bucket, sums: SliceSums) -> None:
        bucket.close(self._steps.samples()[self._number])
        if self._digest is not None:
            self._digest.add(bucket)
        sums.take(self._number)

    def _begin(self) -> None:
        if not self._slices.open:
            raise ConfigError(
                "RunConfig(exact=True) and a backward pass outside of the slices of a step: its "
                "gradient would be a mean over workers, and depend on their number. The step was "
                "not taken; the run ends. Draw batches from ctx.loader(..., slices=8) and run "
                "backward for each slice, or leave exact out."
            )
        super()._begin()
        for gradients, sums in zip(self._buckets, self._sums, strict=True):
            if not isinstance(gradients, GradientBucket) or gradients.collect is None:
                continue
            if self._passes.nest:  # ctx.backward() has ended: all gradients are there
                gradients.collect = None
            else:
                sums.collect(self._number)
                self._fills = True

    def _launch_filled(self) -> None:
        if self._slices.launching:  # gradients are collected from earlier slices, too
            super()._launch_filled()

    def _launch_next(self, group: Group) -> None:
        number = self._launched
        self._driver.phase("bucket", number)
        bucket, sums = self._buckets[number], self._sums[number]
        if self._active and sums.lacks(self._number):
            self._take(bucket, sums)  # within the backward pass of the last slice
        reduction = sums.launch(group, self._steps.sharing(group.members))
        self._under_way.append(reduction)
        bucket.pending = reduction.pending
        if self._driver.on_reduced is not None:
            bucket.pending.on_finish(partial(self._driver.on_reduced, number))
        self._launched += 1

    def prepare(self, generation: int) -> None:
        """What was taken is ready for any generation."""
        if generation != self._generation:
            self._weigh(generation)
            self._under_way = []
            for bucket in self._buckets:
                bucket.restart()

    def launch(self, group: Group) -> Iterator[Pending]:
        """See Reducer. First everybody is given rows to add up, then all are given the sums."""
        self.prepare(group.generation)
        while self._launched < len(self._buckets):
            self._launch_next(group)
        yield from [reduction.pending for reduction in self._under_way]
        sums = [reduction.go_on() for reduction in self._under_way]
        yield from [pending for pending in sums if pending is not None]
        for reduction in self._under_way:
            reduction.finish()
