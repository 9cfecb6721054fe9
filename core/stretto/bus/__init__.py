"""Typed messages over NATS.

Private to the core: plugins import nothing from here.
"""
