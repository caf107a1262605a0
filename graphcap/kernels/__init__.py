"""Kernels in Triton: attention, loss and update, each with a plain twin elsewhere that it is compared with."""
