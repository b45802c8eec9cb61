"""Programs written for other libraries: what becomes of each foreign name here, and the text with our imports.

Nothing of a program is run, and none of its names is guessed: what a world's table (:mod:`shardwise.worlds`) does not
have is missing. What may not enter: any knowledge of one world.
"""

from __future__ import annotations

from shardwise.port.findings import Finding, findings
from shardwise.port.page import markdown
from shardwise.port.rewrite import rewritten

__all__ = ["Finding", "findings", "markdown", "rewritten"]
