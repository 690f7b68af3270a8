"""What several processes that train one model agree on, over a `Group` of an engine."""
