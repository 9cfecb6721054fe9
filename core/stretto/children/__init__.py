"""The bodies of child processes: rewards, tools, environments, and the trials of `stretto check`.

Private to the core: plugins import nothing from here.
"""
