"""Deployments: a recipe turned into folders for a coordinator, sites and peers, and run there."""
