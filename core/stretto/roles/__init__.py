"""What each kind of worker process does. Private to the core: plugins import nothing from here."""
