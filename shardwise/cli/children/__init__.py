"""A folder for PYTHONPATH: what every Python process does that a program under ``shardwise run --as`` starts.

The ``sitecustomize`` in it runs before anything else of such a process. What may not enter: any other file, which every
such program could import by its name alone.
"""
