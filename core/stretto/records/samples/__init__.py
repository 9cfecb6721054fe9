"""Kept samples and answers, as other processes read them."""
