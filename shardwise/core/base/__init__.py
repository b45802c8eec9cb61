"""Validation, warnings, names, sizes, state tables, events, devices and private torch functions, for every folder."""
