"""Memory beyond the device: the disk tier."""
