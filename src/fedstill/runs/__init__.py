"""Runs and their folders: begun, resumed, drawn and finished."""
