"""Sites and peers: the same methods where every party keeps its own data and memories."""
