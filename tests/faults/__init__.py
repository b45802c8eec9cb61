"""Campaigns that destroy things at random moments; see kills.py."""
