"""Checks against a checkout of another library: DeepSpeed's own tests, and ColossalAI's names."""
