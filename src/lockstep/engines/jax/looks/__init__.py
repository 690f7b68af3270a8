"""What `verify` and `bench` see of a model's steps."""
