"""Static buffers, the step and its launches: fill a slot, run a micro step, update."""

from graphcap.engine.buckets import Engine

__all__ = ["Engine"]
