"""Everything that needs a device, in one command: ``make gpu``, or ``python -m benchmarks.gpu``."""
