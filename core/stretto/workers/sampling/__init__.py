"""The rollout worker: a ticket's way through workflow, engine and verifier into the log."""
