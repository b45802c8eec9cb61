"""The tests' short set under every Python and torch that are supported, each in an environment of its own.

Needs nothing but Python: what is tried is installed into the environments.
"""
