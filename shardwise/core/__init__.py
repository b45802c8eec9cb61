"""The engine and its parts, in layers: each folder imports only folders that are listed before it in the design."""
