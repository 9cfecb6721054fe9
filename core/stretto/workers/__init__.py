"""Trainer, inference, rollout and verifier workers. Private to the core: plugins import nothing from here."""
