"""Many runs of one run file."""
