"""Agents that call the policy over OpenAI's HTTP API, and the trajectories of their calls.

Public: for authors of workflows.
"""
