"""The module layout of ColossalAI for what users import from ``colossalai.nn``."""

from __future__ import annotations
