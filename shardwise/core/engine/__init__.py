"""The engine of one model: connects storage, gathering, backward passes, optimizer steps and states.

Code belongs here if it needs several of the lower packages at once, such as an update that gathers, or a state that is
read from all tiers. Nothing here knows about front-ends or file formats. Begin with ``engine.py`` (the parts and their
event listeners), then read ``model_hooks.py`` (hooks on the model) and ``optimizer.py`` (one step).
"""
