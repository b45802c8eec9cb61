"""Validation, names, sizes, state tables, events, devices and private torch functions: what every folder may use."""
