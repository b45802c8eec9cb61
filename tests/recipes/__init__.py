"""The recipes of CONTRIBUTING.md, each carried out as another package would: nothing here is private to shardwise."""
