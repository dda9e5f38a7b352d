"""What a machine has, and what a training lacks on it: probes, each alone, and what is to be done."""
