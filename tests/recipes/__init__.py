"""The recipes of CONTRIBUTING.md, written as another package would: they use no private names of shardwise."""
