"""What inference engines share: the intake of requests, stop strings, and the base of server engines.

Public: for authors of inference engines.
"""
