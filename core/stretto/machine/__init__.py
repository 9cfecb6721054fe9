"""What the rooms above ask of the machine: clocks, processor cores, processes, network, private files."""
