"""CPU devices that say to lockstep, and to lockstep alone, that they are GPUs."""
