"""Training engines for Hugging Face models: what their layouts have in common.

Public: for authors of training engines.
"""
