"""From a run file to a run: components by name, typed sections, the dataflow and its placement.

Private to the core: plugins import nothing from here.
"""
