"""Access to the machine for the rest of the core: clocks, cores, processes, network, private files."""
