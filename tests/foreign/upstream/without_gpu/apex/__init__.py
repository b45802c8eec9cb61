"""A stand-in for NVIDIA's apex, which no registry has: tests of ColossalAI's compare with its mixed precision."""

from apex import amp

__all__ = ["amp"]
