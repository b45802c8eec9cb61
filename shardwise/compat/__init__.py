"""Compatibility aliases: the names that programs import from other libraries, one table for each library.

A table is a TOML file of this folder. It says where each foreign name is here, or what to use instead
(:mod:`shardwise.compat.table`). The modules that programs import are made from it
(:mod:`shardwise.compat.import_hooks`), ``shardwise port`` rewrites and explains programs with it
(:mod:`shardwise.compat.port`), and pages of the documentation list it.

The behavior of a name does not belong here: it is in the folder of the front-end.
"""

from __future__ import annotations

from shardwise.compat.import_hooks import UnsupportedName, impersonate, install_aliases, lookup
from shardwise.compat.table import Alias, AliasTable, Unsupported, alias_table, alias_tables

__all__ = [
    "Alias",
    "AliasTable",
    "Unsupported",
    "UnsupportedName",
    "alias_table",
    "alias_tables",
    "impersonate",
    "install_aliases",
    "lookup",
]
