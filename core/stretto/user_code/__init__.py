"""Code that is not part of stretto: how it is found, and the sandbox it runs in.

Public: for authors of workflows, rewards and datasets.
"""
