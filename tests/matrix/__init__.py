"""Run the short set of tests with each supported Python and torch, each combination in its own environment.

The runner itself needs only Python.
"""
