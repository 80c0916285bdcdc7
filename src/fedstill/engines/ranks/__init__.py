"""Where nodes are played: the processes of one job and what they say to each other."""
