"""What is sampled next and trained next: draws, tickets, batches, staleness."""
