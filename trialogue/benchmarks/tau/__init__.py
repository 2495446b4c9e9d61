"""TAU-bench (`tau1`) and TAU2-bench (`tau2`). The modules of this package define their tools."""
