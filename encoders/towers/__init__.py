"""One file per family of vision towers."""
