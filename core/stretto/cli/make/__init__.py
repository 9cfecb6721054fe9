"""Commands that make something: a project, a model, an invitation, a certificate."""
