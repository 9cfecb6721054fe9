"""The verifier: rewards, tools and environments in child processes."""
