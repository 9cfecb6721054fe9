"""The way of a run file to a started run: composed, checked, confirmed, handed over."""
