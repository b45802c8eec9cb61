"""Fault campaigns: killed processes, damaged bytes, failing system calls, hostile files, and a long run."""
