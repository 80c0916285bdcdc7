"""Audits: attacks on a run or on a mechanism, and what they prove; see docs/audits.md."""
