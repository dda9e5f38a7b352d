"""The jobs of a sweep: how one runs, on which devices, how it is stopped, and what came of all."""
