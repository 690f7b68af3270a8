"""What everything above stands on: the interface of an engine."""
