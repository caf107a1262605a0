"""Static buffers, a step, and its launches: fill a slot, run a micro step, update; eagerly or from captured graphs."""

from graphcap.data.planner import Bucket
from graphcap.engine.buckets import Engine, Step
from graphcap.engine.slots import Buffer, Slot

__all__ = ["Bucket", "Buffer", "Engine", "Slot", "Step"]
