"""Tensor, sequence and pipeline parallelism and 8-bit products: layers, schedules and tables of architectures."""
