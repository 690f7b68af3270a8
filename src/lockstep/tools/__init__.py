"""What a user runs beside a training: verify, bench, plan, doctor and demo."""
