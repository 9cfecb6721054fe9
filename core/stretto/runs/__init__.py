"""Runs from Python."""
