"""Memory of a running launch: checked and counted accesses, asynchronous copies, mbarriers."""
