"""Sharding of weights with FSDP2: which modules form a unit, and what each rank holds."""
