"""Setup and simulations for tests and benchmarks: a late GPU, two hosts, one rank of many. Not in the wheel."""
