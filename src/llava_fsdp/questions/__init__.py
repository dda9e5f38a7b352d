"""Questions of benchmarks, their right answers, and a model's answers to them, as files. Knows no model."""
