"""Validation, warnings, names, sizes, state tables, events, devices and private torch functions, for every folder.

Names without an underscore are for other folders.
"""
