"""Pipeline parallelism: the stages of a model on several ranks, and which of them does what when.

Schedules are data; what runs them knows nothing of optimizers and engines, and what a stage of a model is is data of
the architecture. Nothing here reads the environment or makes groups.
"""
