"""One flat weight buffer and one flat gradient buffer, for parameters of one precision that the same ranks share.

Local tensors are what lies in the buffers; main parameters and checkpoints speak of them in the plain model's
coordinates.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.parallel.accumulate import (
    AccumulatingExperts,
    AccumulatingLinear,
    Joined,
    JoinedTarget,
    Place,
    Target,
    accumulates,
)
from paceline.parallel.buckets import Bucket, Slot, plan_buckets
from paceline.parallel.engine import MainParameter, ParameterInit
from paceline.parallel.flat_weights import FlatWeights, KeptWeights, PassingWeights, Route
from paceline.parallel.lanes import Lane
from paceline.parallel.parameters import Site, main_dtype
from paceline.parallel.reduction import GradientReducer
from paceline.parallel.shard_state import ShardState
from paceline.parallel.shards import Shard
from paceline.parallel.spread import Spread


@dataclass(frozen=True, kw_only=True)
class FlatSettings:
    """What all groups of an engine share."""

    device: torch.device
    accumulate_dtype: torch.dtype
    bucket_elements: int
    offload: bool
    lane: Lane
    widen_gradients: bool = True
    """Sums in a narrower dtype are copied to the main dtype for the optimizer. False: it reads them as they are, where
    torch lets a parameter have such a gradient (`grad_dtype`)."""


class FlatGroup:
    """Buffers, buckets and shards of some parameters, and the communication for them.

    ``counted``: see `MainParameter`. ``early``: buckets may be sent while backward runs, as soon as they are full;
    otherwise, since a gradient may come several times, all are sent by `finish`. ``passing``: weights come and go, see
    `PassingWeights`. ``joined``: see `FlatEngine`; those whose weights are all here lie side by side.

    Life: `materialize`. A step: `zero`, hooks during backward, `begin_last` before the last one if ``early``, `finish`,
    the optimizer, `publish`; `wait_for` before a bucket's weights are read, `release` when they have been.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        shards: Mapping[str, Shard],
        spread: Spread,
        reducer: GradientReducer,
        settings: FlatSettings,
        *,
        counted: bool,
        early: bool,
        passing: bool = False,
        joined: Sequence[Joined] = (),
    ) -> None:
        first = next(iter(sites.values()))
        self._sites, self._reducer, self._settings = dict(sites), reducer, settings
        self._shards = {name: shards[name] for name in sites}
        self._spread, self._shard_axis, self._counted = spread, spread.shard_axis, counted
        self.stages, self.early, self._passing = first.stages, early, passing
        self._lane = settings.lane
        self._dtype, self._main_dtype = first.compute_dtype, main_dtype(first.parameter.dtype)
        self._accumulate_dtype = torch.float64 if self._main_dtype == torch.float64 else settings.accumulate_dtype
        self._joined = self._inside(joined)
        self.layout = plan_buckets(
            {name: site.parameter.shape for name, site in sites.items()},
            shard_degree=self._shard_axis.size,
            bucket_elements=settings.bucket_elements,
            together=list(self._joined),
        )
        self._slots = self.layout.slots
        self._fresh = torch.ones(len(self._sites), dtype=torch.bool)
        """On the host, by parameter: no gradient has arrived since `zero`, and its part of the buffer is of an earlier
        step."""
        self._waiting: list[set[str]] = []
        """Per bucket, parameters whose gradients are to arrive before it is sent; only during the last micro-batch."""
        self._started = 0
        """Buckets that are on their way. They start strictly in order, so all ranks send the same ones at a time."""
        self._reductions: list[tuple[Bucket, Callable[[], None], torch.cuda.Event | None]] = []
        self._read: dict[nn.Module, set[int]] = {}
        """Buckets that a block reads once after each change."""
        self._unread: dict[int, set[nn.Module]] = {}
        """Per bucket, the blocks that have not read it since the last change."""

    def _inside(self, joined: Sequence[Joined]) -> dict[tuple[str, ...], Joined]:
        """By the names of their weights, those that nothing else refers to."""
        names = {site.owners[0]: name for name, site in self._sites.items() if len(site.owners) == 1}
        found = {tuple(names.get((linear, "weight"), "") for linear in each.linears): each for each in joined}
        return {members: each for members, each in found.items() if all(members)}

    # ---- memory

    def materialize(self, init: ParameterInit) -> None:
        """Gives the parameters memory and weights, which are first drawn in the main dtype."""
        self._allocate()
        for name, site in self._sites.items():
            shard = self._shards[name]
            init(name, site.parameter.data, shard.whole, shard.offsets)
        self._settle()

    def _allocate(self) -> None:
        """Buffers; parameters become views in the main dtype, to be initialised in full precision."""
        device, size = self._settings.device, self.layout.size
        # weights that come and go have no buffer: one element stands for all
        element = torch.zeros(1 if self._passing else size, dtype=self._dtype, device=device)
        self._weights = element.expand(size) if self._passing else element
        self._gradients = torch.zeros(size, dtype=self._accumulate_dtype, device=device)
        if self._dtype == self._main_dtype:
            self._initial = self._weights
        elif self._accumulate_dtype == self._main_dtype:
            self._initial = self._gradients  # not needed yet, and just right
        else:
            self._initial = torch.zeros(size, dtype=self._main_dtype, device=device)
        self._bind(self._initial)

    @torch.no_grad()
    def _settle(self) -> None:
        """Takes main weights and compute weights from the initialised parameters, which become views of the latter."""
        self.state = ShardState(
            self.layout,
            self._shard_axis.index,
            self._weights,
            self._gradients,
            self._main_dtype,
            offload=self._settings.offload,
            widen_gradients=self._settings.widen_gradients or not hasattr(torch.Tensor, "grad_dtype"),
            keeps_weights=not self._passing,
        )
        if self.state.own_weights is not None:
            for bucket in self.layout.buckets:
                self.state.weight_shard(bucket).copy_(self.state.shard_of(self._initial, bucket))
        route = Route(state=self.state, axis=self._spread.weights_axis, lane=self._lane)
        self.compute_weights: FlatWeights
        if self._passing:
            self.compute_weights = PassingWeights(self._dtype, self._settings.device, route)
        else:
            self.compute_weights = KeptWeights(self._weights, route)
        if self._initial is not self._weights:
            if not self._passing:
                self._weights.copy_(self._initial)
            self._initial.zero_()
        for name, site in self._sites.items():
            site.replace(self.compute_weights.of(self._slots[name]))
        del self._initial
        self._places = {
            name: Place(gradient=self._gradients.data[slot.start : slot.end].view(slot.shape), fresh=fresh)
            for (name, slot), fresh in zip(self._slots.items(), self._fresh, strict=True)
        }
        for name, site in self._sites.items():
            site.parameter.register_post_accumulate_grad_hook(self._arrival_of(self._slots[name]))
        self.main_parameters = [
            self._main_parameter(slot)
            for name in self._sites
            if len(range(*self.state.owned(slot := self._slots[name])))
        ]

    def _bind(self, buffer: Tensor) -> None:
        for name, site in self._sites.items():
            slot = self._slots[name]
            site.replace(buffer[slot.start : slot.end].view(slot.shape))

    def _main_parameter(self, slot: Slot) -> MainParameter:
        param = nn.Parameter(self.state.weight_of(slot))
        if (dtype := self.state.gradient_of(slot).dtype) != param.dtype:
            param.grad_dtype = dtype
        return MainParameter(
            name=slot.name,
            param=param,
            global_shape=self._shards[slot.name].whole,
            locate=lambda local: self._located(slot, local),
            counted=self._counted,
            shard_axis=self._spread.whole_axis,
            compute=self.state.compute_weight_of(slot),
        )

    def _located(self, slot: Slot, owned: Tensor) -> ShardedValue:
        """A tensor laid out like this rank's range of a parameter, in the plain model's coordinates."""
        shard, (start, _) = self._shards[slot.name], self.state.owned(slot)
        value = ShardedValue.from_flat_range(owned, slot.shape, start)
        return value.inside(shard.whole, shard.offsets, saved=shard.saved)

    # ---- gradients

    def zero(self) -> None:
        """Gradients of an earlier step are forgotten; nothing is written: the first to arrive replaces them."""
        assert not self._reductions, "gradients are still on their way"
        self._fresh.fill_(True)
        self._waiting, self._started = [], 0
        for parameter in self.main_parameters:
            parameter.param.grad = None

    def begin_last(self) -> None:
        """The next backward is the last one: a bucket whose gradients have all arrived is sent at once."""
        assert self.early, list(self._sites)
        self._waiting = [{slot.name for slot in bucket.slots} for bucket in self.layout.buckets]

    def _arrival_of(self, slot: Slot) -> Callable[[Tensor], None]:
        # the collector does not see through a parameter's hooks: what one holds strongly would live as long as the
        # process, and with this group every buffer and process group
        this = weakref.ref(self)
        place = self._places[slot.name]

        @torch.no_grad()
        def arrival(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            group = this()
            if gradient is None:
                return  # a product has added it already; autograd runs hooks all the same (torch 2.13)
            assert group is not None, f"{slot.name}: its engine is gone"
            group._arrived(slot, place, gradient)

        return arrival

    def targets_in(self, block: nn.Module) -> list[Target | JoinedTarget]:
        """The layers of ``block`` whose backward may add to their weights' places itself."""
        inside = set(block.modules())
        found: list[Target | JoinedTarget] = [
            JoinedTarget(joined=joined, place=place, arrived=functools.partial(self._count_all, names))
            for names, joined in self._joined.items()
            if joined.linears[0] in inside and (place := self._joined_place(names)) is not None
        ]
        for name, site in self._sites.items():
            layer, attribute = site.owners[0]
            # of a tied weight, autograd sums the gradients
            if len(site.owners) > 1 or not accumulates(layer, attribute):
                continue
            if layer in inside:
                assert isinstance(layer, AccumulatingLinear | AccumulatingExperts)
                arrived = functools.partial(self._count, self._slots[name])
                found.append(Target(layer=layer, place=self._places[name], arrived=arrived, attribute=attribute))
        return found

    def _joined_place(self, names: Sequence[str]) -> Place | None:
        """One for all; None where they do not lie side by side, or sums are in another precision than gradients."""
        slots = [self._slots[name] for name in names]
        apart = any(one.end != other.start for one, other in itertools.pairwise(slots))
        if apart or self._accumulate_dtype != self._dtype:
            return None
        rows, first = sum(slot.shape[0] for slot in slots), list(self._slots).index(names[0])
        place = self._gradients.data[slots[0].start : slots[-1].end].view(rows, slots[0].shape[1])
        return Place(gradient=place, fresh=self._fresh[first : first + len(slots)])

    def _count_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._count(self._slots[name])

    def _arrived(self, slot: Slot, place: Place, gradient: Tensor) -> None:
        if place.fresh:
            place.gradient.copy_(gradient)
            place.fresh.fill_(False)
        else:
            place.gradient.add_(gradient)
        self._count(slot)

    def _count(self, slot: Slot) -> None:
        assert slot.bucket >= self._started, f"{slot.name}: a gradient arrived after its bucket was sent"
        if self._waiting:
            self._waiting[slot.bucket].discard(slot.name)
            self._start_ready()

    def _start_ready(self) -> None:
        while self._started < len(self._waiting) and not self._waiting[self._started]:
            self._start(self.layout.buckets[self._started])

    def _start(self, bucket: Bucket) -> None:
        """Sends a bucket; parameters without a gradient count as zero."""
        self._started += 1
        for slot in bucket.slots:
            if self._places[slot.name].fresh:
                self._gradients[slot.start : slot.end].zero_()
        lane, shard = self._lane, self.state.shard_of(self._gradients, bucket)
        with lane.run():
            finish = self._reducer.start(
                self._gradients[bucket.start : bucket.end], shard, async_op=not lane.asynchronous
            )
            if lane.asynchronous:
                finish()
                self.state.store_gradients(bucket)
        self._reductions.append((bucket, finish, lane.mark()))

    @torch.no_grad()
    def finish(self) -> None:
        """Sends what has not been sent, and waits for the sums."""
        for bucket in self.layout.buckets[self._started :]:
            self._start(bucket)
        for bucket, finish, mark in self._reductions:
            self._lane.wait(mark)
            if not self._lane.asynchronous:
                finish()
                self.state.store_gradients(bucket)
        self._reductions.clear()
        if self.state.offload:
            self._lane.drain()
        for parameter in self.main_parameters:
            parameter.param.grad = self.state.gradient_of(self._slots[parameter.name])

    # ---- weights

    @torch.no_grad()
    def publish(self, *, cast: bool = True) -> None:
        """Main weights go to the ranks that compute with them. ``cast``: see `Engine`."""
        self._forget_readers()
        self.compute_weights.publish(cast=cast)

    def wait_for(self, buckets: Iterable[int]) -> None:
        """The weights of these buckets are there for the current stream."""
        self.compute_weights.wait_for(buckets)

    @property
    def is_passing(self) -> bool:
        """Whether weights come and go."""
        return self._passing

    def read_by(self, blocks: Iterable[nn.Module]) -> None:
        """These call `release`, once after each change. For weights that come and go."""
        self._read = {block: self.buckets_of(block) for block in blocks}
        self._forget_readers()

    def release(self, block: nn.Module) -> None:
        """The block has read its weights: buckets that no other block is still to read go, if this group's do."""
        for index in self._read.get(block, ()):
            self._unread[index].discard(block)
            if not self._unread[index]:
                self.compute_weights.release([index])

    def _forget_readers(self) -> None:
        self._unread = {
            bucket.index: {block for block, inside in self._read.items() if bucket.index in inside}
            for bucket in self.layout.buckets
        }

    def buckets_of(self, module: nn.Module) -> set[int]:
        """The buckets in which parameters of ``module`` lie."""
        inside = set(module.modules())
        return {
            self._slots[name].bucket
            for name, site in self._sites.items()
            if any(owner in inside for owner, _ in site.owners)
        }

    def weights(self) -> dict[str, ShardedValue]:
        slots = [self._slots[name] for name in self._sites]
        return {slot.name: self._located(slot, self.state.weight_of(slot)) for slot in slots}

    def bytes_by_kind(self) -> dict[str, int]:
        own = [self.state.own_weights, self.state.own_gradients, self.state.staging]
        sizes = [0 if tensor is None else tensor.nbytes for tensor in own]
        if self.state.offload:
            return {"parameters": self.compute_weights.nbytes, "gradients": self._gradients.nbytes, "host": sum(sizes)}
        return {
            "parameters": self.compute_weights.nbytes,
            "gradients": self._gradients.nbytes + sizes[1],
            "masters": sizes[0],
        }
