"""Links between clusters: one-sided and collective, over either backend (spec api-datadist §3 - §7)."""
