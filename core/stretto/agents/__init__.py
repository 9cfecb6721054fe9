"""Agents that call the policy over the HTTP API of OpenAI or Anthropic, and the trajectories of their calls.

Public: for authors of workflows.
"""
