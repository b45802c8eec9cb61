"""What the tests and the benchmarks simulate: a late GPU, two hosts, one rank of many. Not in the wheel."""
