"""Samples for whole models of transformers, whose own processor prepares texts and images."""
