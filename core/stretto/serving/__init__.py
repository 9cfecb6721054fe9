"""What inference engines share: the intake of requests, stop strings, and the frame of HTTP servers' engines.

Public: for authors of inference engines.
"""
