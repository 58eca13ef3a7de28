"""The main weights and gradients of this rank's shards: where is their memory?"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.parallel.buckets import Bucket, Layout, Slot


class ShardState:
    """Main (fp32) weights and gradients of one rank, as far as they are not the flat buffers themselves.

    | | weights | gradients |
    | --- | --- | --- |
    | compute dtype is the main dtype | a view of the weight buffer | |
    | accumulate dtype is the main dtype, or the optimizer reads that one | | a view of the gradient buffer |
    | otherwise | memory of their own, 1 / shards of the buffer | the same |
    | offloaded | host memory, pinned beside a GPU | the same |

    Without ``keeps_weights`` there is no weight buffer: ``weights`` says its size, dtype and device.
    On a CPU offloading moves nothing, but takes the same path: memory of their own, copied to and from.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        weights: Tensor,
        gradients: Tensor,
        dtype: torch.dtype,
        *,
        offload: bool,
        widen_gradients: bool = True,
        keeps_weights: bool = True,
    ) -> None:
        self._keeps_weights = keeps_weights
        self.layout, self.shard, self.dtype, self.offload = layout, shard, dtype, offload
        self._weights, self._gradients = weights, gradients
        self._starts: list[int] = []
        size = 0
        for bucket in layout.buckets:
            self._starts.append(size)
            size += layout.shard_size(bucket)
        device = torch.device("cpu") if offload else weights.device
        pin = offload and weights.is_cuda

        def own(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device, pin_memory=pin)

        self.own_weights = own(dtype) if offload or weights.dtype != dtype else None
        widens = widen_gradients and gradients.dtype != dtype
        self.own_gradients = own(dtype) if offload or widens else None
        # the host casts into pinned memory before it sends: half the bytes, and a copy that runs beside compute
        self.staging = own(weights.dtype) if offload and weights.dtype != dtype else None

    def owned(self, slot: Slot) -> tuple[int, int]:
        """Range of the flattened parameter that is this rank's; (0, 0) if nothing is."""
        start, end = self.layout.owned(slot, self.shard)
        return (start - slot.start, end - slot.start) if start < end else (0, 0)

    def weight_of(self, slot: Slot) -> Tensor:
        """[elements owned]: the main weights of a parameter that are this rank's."""
        return self._part(slot, self.weight_shard(self.layout.buckets[slot.bucket]))

    def compute_weight_of(self, slot: Slot) -> Tensor | None:
        """[elements owned]: the same in the weight buffer, where that is other memory on the same device."""
        if self.own_weights is None or self.offload or not self._keeps_weights:
            return None
        return self._part(slot, self.shard_of(self._weights, self.layout.buckets[slot.bucket]))

    def gradient_of(self, slot: Slot) -> Tensor:
        return self._part(slot, self.gradient_shard(self.layout.buckets[slot.bucket]))

    def weight_shard(self, bucket: Bucket) -> Tensor:
        """[bucket size / shards]"""
        return self.shard_of(self._weights, bucket) if self.own_weights is None else self._own(self.own_weights, bucket)

    def gradient_shard(self, bucket: Bucket) -> Tensor:
        if self.own_gradients is None:
            return self.shard_of(self._gradients, bucket)
        return self._own(self.own_gradients, bucket)

    def shard_of(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket, as a view of a flat buffer."""
        start = self.layout.shard_start(bucket, self.shard)
        return buffer[start : start + self.layout.shard_size(bucket)]

    def store_gradients(self, bucket: Bucket) -> None:
        """The reduced shard goes to where the optimizer reads it; queued on the current stream."""
        if self.own_gradients is not None:
            reduced = self.shard_of(self._gradients, bucket)
            if reduced.dtype != self.dtype and reduced.is_cuda:
                reduced = reduced.to(self.dtype)
            self._own(self.own_gradients, bucket).copy_(reduced, non_blocking=True)

    def cast_for_sending(self, bucket: Bucket) -> None:
        """Offloaded weights in the compute dtype, by the host. Before `load_weights`."""
        if self.staging is not None:
            self._own(self.staging, bucket).copy_(self.weight_shard(bucket))

    def load_weights(self, bucket: Bucket) -> None:
        """The main weights go to this rank's shard of the weight buffer; queued on the current stream."""
        if self.own_weights is not None:
            source = self.own_weights if self.staging is None else self.staging
            self.shard_of(self._weights, bucket).copy_(self._own(source, bucket), non_blocking=True)

    def _own(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        start = self._starts[bucket.index]
        return buffer[start : start + self.layout.shard_size(bucket)]

    def _part(self, slot: Slot, shard_of_bucket: Tensor) -> Tensor:
        start, end = self.layout.owned(slot, self.shard)
        offset = self.layout.shard_start(self.layout.buckets[slot.bucket], self.shard)
        # .data: a version counter of its own; see Site.replace
        return shard_of_bucket.data[start - offset : end - offset]
