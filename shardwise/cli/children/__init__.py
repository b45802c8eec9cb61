"""A folder for PYTHONPATH: code for every Python process that a program under ``shardwise run --as`` starts.

Its ``sitecustomize`` runs before anything else in such a process. Do not add other files: every such program could
import them as top-level modules.
"""
