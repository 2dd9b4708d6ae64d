"""Follows Python code without running it, to find where the host waits for the GPU."""
