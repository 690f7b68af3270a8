"""What several processes that train one model agree on, over a `ProcessGroup` of an engine."""
