"""Pipeline parallelism: the stages of a model on several ranks, and the schedule of their passes.

Schedules are data; the code that runs them is independent of optimizers and engines, and the stages of a model are
described by its architecture. Nothing here reads the environment or creates process groups.
"""
