"""Federated learning by distillation."""
