"""Images and videos of a row that ranks share: each computed by one rank, its features sent to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vlmpack.families import FeatureForm, media_features
from vlmpack.layout import IMAGE, VIDEO, Grid, to_device
from vlmpack.parallel import Exchange, MediaShare, Partition
from vlmpack.step.context import CONTEXT, RowContext, VisionSegments
from vlmpack.step.whole import MediaCall, MediaInputs


def shared_media(call: MediaCall, partition: Partition, exchange: Exchange) -> MediaInputs:
    """The features of this rank's tokens.

    The tower is called once on every rank, whatever the row holds: also where there is nothing for it to do.
    """
    if not call.family.has_vision:
        return MediaInputs(inputs={})
    shares = _spread(call, exchange.size)
    features = _computed(call, shares, exchange.rank)
    form = FeatureForm.of(features)
    counts = [sum(share.features[i] for i in share.items(exchange.rank)) for share in shares]
    images, videos = form.join(features)[: sum(counts)].split(counts)
    types = call.types if exchange.size == 1 else call.types.cpu()
    return MediaInputs(
        inputs={
            "pixel_values": _sent(images, shares[0], types, IMAGE, partition, exchange),
            "pixel_values_videos": _sent(videos, shares[1], types, VIDEO, partition, exchange),
        },
        form=form,
    )


def _spread(call: MediaCall, ranks: int) -> tuple[MediaShare, MediaShare]:
    """Images and videos, spread over ranks together."""
    images, videos = call.metadata.image_grids, call.metadata.video_grids
    both = MediaShare.spread((*images, *videos), ranks=ranks, merge=call.family.merge(call.model.config))
    cut = len(images)
    return (
        replace(both, grids=both.grids[:cut], rank_of=both.rank_of[:cut]),
        replace(both, grids=both.grids[cut:], rank_of=both.rank_of[cut:]),
    )


def _computed(call: MediaCall, shares: Sequence[MediaShare], rank: int) -> Any:
    """What the tower makes of this rank's images and videos, in one call."""
    config, media, device = call.model.config, call.row.media, call.row.input_ids.device
    pixels = (media.pixel_values, media.pixel_values_videos)
    grids = [share.grids[i] for share in shares for i in share.items(rank)]
    parts = [share.take(of_all, rank) for share, of_all in zip(shares, pixels, strict=True) if of_all is not None]
    if not grids:  # a blank image, of which nothing is read
        merge = call.family.merge(config)
        grids = [(1, merge, merge)]
        parts = [torch.zeros(merge**2, call.family.patch_channels(config), device=device)]
    context = _tower_context(call, grids)
    on_device = to_device(np.asarray(grids, np.int64), device)
    return media_features(call.family.backbone(call.model), torch.cat(parts), on_device, **{CONTEXT: context})


def _tower_context(call: MediaCall, grids: Sequence[Grid]) -> RowContext:
    segments = call.family.vision_segments(grids, call.model.config)
    return RowContext(segments=call.row.segments, vision=VisionSegments(segments), backend=call.backend)


def _sent(
    own: torch.Tensor, share: MediaShare, types: torch.Tensor, kind: int, partition: Partition, exchange: Exchange
) -> torch.Tensor:
    """The features of the images that this rank computed to those of the tokens that it has, in their order."""
    if exchange.size == 1 or not share.grids:
        return own
    going = share.route(types, kind, partition, exchange.rank)
    got = exchange.along(going.route, own, "images")
    return got.index_select(0, to_device(np.argsort(going.tokens.numpy()), own.device))
