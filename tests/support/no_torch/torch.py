"""What a process finds instead of torch if this folder comes first on its path: nothing."""

raise ImportError("torch is left out of this process; see support/processes.py")
