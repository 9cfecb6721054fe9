"""The worker processes: trainer, inference, rollout and verifier.

Private to the core: plugins import nothing from here.
"""
