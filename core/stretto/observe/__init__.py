"""What people see of a run: observers of the kernel's events, and what they write, serve and draw."""
