"""Foreign worlds: the names that programs of other libraries import, each library's in a single table.

A table is a TOML file in this folder. It says of each foreign name where it is here, or why it is not and what to do
instead (:mod:`shardwise.compat.table`). The modules that programs import are made from it (:func:`mirror`),
``shardwise port`` rewrites and explains with it, and the pages of documentation list it.

What may not enter: anything that a name does. That is in the folder of the world as far as it translates arguments,
and else below it.
"""

from __future__ import annotations

from shardwise.compat.absent import NotHere
from shardwise.compat.impersonation import impersonate
from shardwise.compat.mirror import lookup, mirror
from shardwise.compat.table import Absent, Here, World, all_worlds, read_world

__all__ = ["Absent", "Here", "NotHere", "World", "all_worlds", "impersonate", "lookup", "mirror", "read_world"]
