"""Mutation tests of waits: ``python -m tests.late.mutations`` removes each wait between streams, on the late device."""
