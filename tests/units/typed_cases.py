"""Read by the type checker, not run: what each operation gives, and what it refuses.

Every ``type: ignore`` marks a mistake that the checker must find; one that it does not need is
an error of its own.
"""

from __future__ import annotations

from typing import assert_type

from mpipar import units as u

world = u.WorldSize(4)
rounds = u.CommunicationRounds(2)
_: object

assert_type(u.GlobalBatchSize(128) / world, u.LocalBatchSize)
assert_type(u.ModelWidth(1024) / world, u.ShardWidth)
assert_type(u.LayerCount(12) / world, u.LayersPerRank)
assert_type(u.TensorLength(8) / world, u.ShardLength)
assert_type(u.TensorLine.from_values([1, 2]).length / world, u.ShardLength)
assert_type(u.PipelineStageCount(3) + u.MicroBatchCount(4), u.PipelineScheduleLength)
assert_type(u.CommunicationBytes(64) + u.CommunicationBytes(64), u.CommunicationBytes)
assert_type(u.CommunicationBytes(64) * rounds, u.CommunicationBytes)
assert_type(u.Bytes(64) + u.Bytes(64), u.Bytes)
assert_type(u.Bytes(64) * rounds, u.Bytes)
assert_type(u.Bytes(64) / u.BytesPerSecond(2.0), u.Seconds)
assert_type(u.Bytes(64) / u.Seconds(2.0), u.BytesPerSecond)
assert_type(u.CommunicationBytes(64) / u.BytesPerSecond(2.0), u.Seconds)
assert_type(u.Flops(64.0) / u.FlopsPerSecond(2.0), u.Seconds)
assert_type(u.Flops(64.0) / u.Seconds(2.0), u.FlopsPerSecond)
assert_type(u.Seconds(1.0) + u.Seconds(2.0), u.Seconds)
assert_type(u.WorldSize(1) < world, bool)
assert_type(int(world), int)
assert_type(u.DataParallelLayout(u.GlobalBatchSize(8), world).local_batch, u.LocalBatchSize)
assert_type(u.TensorParallelLayout(u.ModelWidth(8), world).shard_width, u.ShardWidth)
assert_type(u.PipelineLayout(u.LayerCount(8), world).layers_per_rank, u.LayersPerRank)
assert_type(u.PipelineLayout(u.LayerCount(8), world).stage_count, u.PipelineStageCount)

_ = u.GlobalBatchSize(128) / u.MicroBatchCount(4)  # type: ignore[operator]
_ = u.GlobalBatchSize(128) / 4  # type: ignore[operator]
_ = world / world  # type: ignore[operator]
_ = u.LocalBatchSize(4) / world  # type: ignore[operator]
_ = u.Bytes(1) + u.CommunicationBytes(1)  # type: ignore[operator]
_ = u.CommunicationBytes(1) + u.Bytes(1)  # type: ignore[operator]
_ = u.CommunicationBytes(1) * 2  # type: ignore[operator]
_ = u.PipelineStageCount(1) + u.PipelineStageCount(1)  # type: ignore[operator]
_ = u.MicroBatchCount(1) + u.PipelineStageCount(1)  # type: ignore[operator]
_ = u.WorldSize(1) < u.LocalBatchSize(2)  # type: ignore[operator]
_ = u.WorldSize(1) >= u.LocalBatchSize(2)  # type: ignore[operator]
_ = u.WorldSize(1) < 2  # type: ignore[operator]
_ = u.WorldSize(u.LocalBatchSize(1))  # type: ignore[arg-type]
_ = u.WorldSize(1.0)  # type: ignore[arg-type]
_ = u.DataParallelLayout(world, u.GlobalBatchSize(8))  # type: ignore[arg-type]
_ = u.RankId(world, world)  # type: ignore[arg-type]
_ = u.Bytes(64) / u.FlopsPerSecond(2.0)  # type: ignore[operator]
_ = u.Flops(64.0) / u.BytesPerSecond(2.0)  # type: ignore[operator]
share: u.ShardWidth = u.GlobalBatchSize(128) / world  # type: ignore[assignment]
