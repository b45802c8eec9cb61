"""The engine of one model: wires storage, gathering, backward passes, optimizer steps and states.

Code belongs here if it needs several of the lower packages at once, such as an update that gathers, or a state that is
read from all tiers. Nothing here knows about front-ends or file formats. Begin with ``engine.py`` (what is made, and
who listens to what), then ``attachment.py`` (hooks on the model) and ``optimizer.py`` (one step).
"""
