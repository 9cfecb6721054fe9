"""The command line. Private to the core: plugins import nothing from here."""
