"""The process that owns a run. Private to the core: plugins import nothing from here."""
