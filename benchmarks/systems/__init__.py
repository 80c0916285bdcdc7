"""Systems that do the same work; each has `run(work)` and `VERSIONS`, packages to be named."""
