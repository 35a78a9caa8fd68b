"""Tensor parallelism: what the partition planner writes down, run over ranks.

The planner's list of computations and moves is interpreted step by step; no layout has code of its
own. A value is a list of tensors, one for each rank that a process computes for: all of them where
ranks are virtual, its own one under ``torch.distributed``.
"""
