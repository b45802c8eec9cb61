"""Programs written for other libraries: which names they use, what becomes of each here, and the text with ours.

Nothing of a program is run, and none of its names is guessed: what a world's table (:mod:`shardwise.worlds`) does not
have is missing. What may not enter: any knowledge of one world.
"""

from __future__ import annotations

from shardwise.port.known import worlds
from shardwise.port.program import Program
from shardwise.port.rewrite import rewritten
from shardwise.port.tables import markdown
from shardwise.port.verdicts import Finding, Verdict, findings

__all__ = ["Finding", "Program", "Verdict", "findings", "markdown", "rewritten", "worlds"]
