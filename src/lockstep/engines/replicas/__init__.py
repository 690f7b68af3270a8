"""What engines with a copy of the model on each device share."""
