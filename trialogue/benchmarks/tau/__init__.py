"""TAU-bench in both generations: `tau1` and `tau2` find the domains, the files beside them hold the tools."""
