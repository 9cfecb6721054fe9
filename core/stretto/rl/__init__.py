"""The arithmetic of reinforcement learning on packed batches.

Public: for authors of algorithms.
"""
