"""What all other packages use: the interface of an engine, and help that needs no framework."""
